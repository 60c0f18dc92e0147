"""Robust aggregation: the coordinate median or trimmed mean in place of the mean.

Yin et al. 2018, arXiv:1803.01498, options I and II of algorithm 1, on model changes
instead of gradients. Neither is a sum, so every client's change is kept: K models of
memory. Clients count equally.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.federated.algorithms.aggregators import plain_sum
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.types import Algorithm, Local


def coordinate_median(x: jax.Array) -> jax.Array:
    """Median over clients of every coordinate, [K, ...] -> [...]."""
    return jnp.median(x, axis=0)


def trimmed_mean(fraction: float) -> Callable:
    """Mean without the largest and smallest floor(fraction K) of every coordinate.

    Raises:
      ValueError: when `fraction` is outside [0, 0.5).
    """
    if not 0 <= fraction < 0.5:
        raise ValueError(f"trimmed fraction must lie in [0, 0.5), got {fraction}.")

    def combine(x):
        cut = int(fraction * len(x))
        return jnp.sort(x, axis=0)[cut : len(x) - cut].mean(axis=0)

    return combine


def robust(
    local: Local, *, combine: str = "median", fraction: float = 0.1
) -> Algorithm:
    """FedAvg with its mean of the clients' changes replaced.

    Args:
      combine: median, or trimmed_mean with its `fraction` in [0, 0.5).

    Raises:
      ValueError: for another word or fraction.
    """
    known = {"median": coordinate_median, "trimmed_mean": trimmed_mean(fraction)}
    if combine not in known:
        raise ValueError(f"combine must be one of {list(known)}, got {combine!r}.")
    base = fedavg(local)

    def client_update(key, server, personal, client):
        output = base.client_update(key, server, personal, client)
        return output._replace(update=(), upload=output.update)

    def server_update(server, result):
        aggregate = jax.tree.map(known[combine], result.upload)
        return base.server_update(server, result._replace(aggregate=aggregate))

    return base._replace(
        client_update=client_update,
        aggregator=plain_sum(),
        server_update=server_update,
    )
