"""Clients as systems: stragglers."""
