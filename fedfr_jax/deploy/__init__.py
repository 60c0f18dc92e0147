"""Deployment of trained models: export, embedding, verification, identification."""
