"""Runs in a browser: read files, render a page, serve pages."""
