"""Configs: files, overrides, and the way from a config to an experiment."""
