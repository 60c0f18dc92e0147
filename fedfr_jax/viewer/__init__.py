"""Runs in a browser: their files read, a page of them, a server of pages."""
