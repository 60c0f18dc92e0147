"""Algorithms: pure functions for one client each."""

from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.federated.algorithms.fedfr import fedfr

ALGORITHMS = {"fedavg": fedavg, "fedfr": fedfr}
