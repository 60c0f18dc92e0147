"""Vectorized federated training: who trains, on what device, and how it is summed."""
