"""Robust aggregation: the coordinate median or trimmed mean in place of the mean.

Yin et al. 2018, arXiv:1803.01498, options I and II of algorithm 1, on model changes
instead of gradients. Neither is a sum, so every client's change is kept: K models of
memory. Clients count equally.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.federated.algorithms.aggregators import plain_sum
from fedfr_jax.types import Algorithm


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


def robust(base: Algorithm, *, combine: Callable = coordinate_median) -> Algorithm:
    """`base` with its mean of updates replaced.

    Args:
      base: an algorithm whose aggregator is the weighted mean of model changes, such
        as `fedavg(...)`.
      combine: [K, ...] -> [...], over the clients' changes of one leaf.
    """

    def client_update(key, server, personal, client):
        output = base.client_update(key, server, personal, client)
        return output._replace(update=(), upload=output.update)

    def server_update(server, result):
        aggregate = jax.tree.map(combine, result.upload)
        return base.server_update(server, result._replace(aggregate=aggregate))

    return base._replace(
        client_update=client_update,
        aggregator=plain_sum(),
        server_update=server_update,
    )
