"""Vectorized federated training: schedule, local training, aggregation."""
