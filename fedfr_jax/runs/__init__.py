"""Runs: stages, loops, checkpoints, reports."""
