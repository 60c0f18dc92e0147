"""Federated training: scheduling, local training, aggregation."""
