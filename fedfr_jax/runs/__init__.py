"""Loops that train, and what they leave on disk."""
