"""Trained networks in use: opened, exported, and asked who is in a picture."""
