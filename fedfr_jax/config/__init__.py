"""Configs: files, overrides, and experiments built from them."""
