"""Trained models in use: export, embedding, verification, identification."""
