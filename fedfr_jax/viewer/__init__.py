"""Runs in a browser: render a page, serve pages; files are read by runs.run_files."""
