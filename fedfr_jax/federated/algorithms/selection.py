"""Selecting models of which some may be faulty: Krum, multi-Krum and Bulyan.

Krum and multi-Krum: Blanchard et al. 2017, arXiv:1703.02757, section 4. Bulyan:
El Mhamdi et al. 2018, arXiv:1802.07927, section 4. Distances are over all leaves
together. Each makes a function (changes, tree of [K, ...], examples [K]) -> tree of
[...], in which clients count equally.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.federated.algorithms.distances import squared_distances
from fedfr_jax.schema import check_ranges


def krum(*, faulty: int = 1, chosen: int = 1) -> Callable:
    """Mean of the `chosen` clients with the least sums of distances to near others.

    Args:
      faulty: f; a sum is of the K - f - 2 smallest squared distances. K >= f + 3.
      chosen: 1 is Krum, more is multi-Krum; at most K.

    Raises:
      ValueError: when a number is out of its range, or the cohort too small.
    """
    check_ranges("", locals(), {"faulty": (0, jnp.inf), "chosen": (1, jnp.inf)})

    def combine(changes, examples):
        del examples
        number = _cohort(changes, max(faulty + 3, chosen))
        scores = krum_scores(squared_distances(changes), number - faulty - 2)
        best = jnp.argsort(scores)[:chosen]
        return jax.tree.map(lambda x: x[best].mean(axis=0), changes)

    return combine


def bulyan(*, faulty: int = 1) -> Callable:
    """Per coordinate, the mean of the values nearest to the median of those chosen.

    K - 2 f clients are chosen by Krum, one after the other, each among those that are
    left; the mean is of K - 4 f values.

    Args:
      faulty: f >= 1; K >= 4 f + 3.

    Raises:
      ValueError: when f is out of its range, or the cohort too small.
    """
    check_ranges("", locals(), {"faulty": (1, jnp.inf)})

    def combine(changes, examples):
        del examples
        number = _cohort(changes, 4 * faulty + 3)
        distances = squared_distances(changes)
        picked = chosen_one_by_one(distances, number - 2 * faulty, faulty)
        nearest = lambda x: near_median(x[picked], number - 4 * faulty)
        return jax.tree.map(nearest, changes)

    return combine


def krum_scores(distances: jax.Array, count: int) -> jax.Array:
    """Sums of the `count` smallest distances [K, K] to others, [K]."""
    apart = jnp.where(jnp.eye(len(distances), dtype=bool), jnp.inf, distances)
    return jnp.sort(apart, axis=1)[:, :count].sum(axis=1)


def chosen_one_by_one(distances: jax.Array, count: int, faulty: int) -> jax.Array:
    """Indices [count] of Krum's choices, each among the clients not chosen yet."""
    number, chosen = len(distances), []
    for taken in range(count):
        nearest = max(number - taken - faulty - 2, 1)
        scores = krum_scores(distances, nearest)
        best = jnp.argmin(scores)
        chosen.append(best)
        is_best = jnp.arange(number) == best
        distances = jnp.where(is_best[:, None] | is_best[None], jnp.inf, distances)
    return jnp.stack(chosen)


def near_median(x: jax.Array, count: int) -> jax.Array:
    """Per coordinate of x [K, ...], the mean of the `count` values near the median."""
    apart = jnp.abs(x - jnp.median(x, axis=0)[None])
    nearest = jnp.argsort(apart, axis=0)[:count]
    return jnp.take_along_axis(x, nearest, axis=0).mean(axis=0)


def _cohort(changes, least):
    number = len(jax.tree.leaves(changes)[0])
    if number < least:
        raise ValueError(
            f"federation.cohort_size must be at least {least} for this many faulty and "
            f"chosen clients, got {number}."
        )
    return number
