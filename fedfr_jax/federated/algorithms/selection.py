"""Selecting models of which some may be faulty: Krum, multi-Krum and Bulyan.

Krum and multi-Krum: Blanchard et al. 2017, arXiv:1703.02757, section 4. Bulyan:
El Mhamdi et al. 2018, arXiv:1802.07927, section 4. Distances are over all leaves
together. Each makes a function (changes, tree of [K, ...], examples [K]) -> tree of
[...], in which clients count equally. A change that is not finite is dropped first,
and K counts the others.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.federated.algorithms.distances import (
    finite_clients,
    masked,
    mean_between,
    squared_distances,
)
from fedfr_jax.schema import check_ranges
from fedfr_jax.types import PyTree


def krum(*, faulty: int = 1, chosen: int = 1) -> Callable:
    """Mean of the `chosen` clients with the least sums of distances to near others.

    Args:
      faulty: f; a sum is of the K - f - 2 smallest squared distances. K >= 2 f + 3.
      chosen: 1 is Krum, more is multi-Krum; at most K.

    Raises:
      ValueError: when a number is out of its range, or the cohort too small.
    """
    check_ranges("", locals(), {"faulty": (0, jnp.inf), "chosen": (1, jnp.inf)})

    def combine(changes, examples):
        del examples
        _cohort(changes, max(2 * faulty + 3, chosen), f"{faulty=}, {chosen=}")
        is_kept = finite_clients(changes)
        number, changes = is_kept.sum(), masked(is_kept, changes)
        distances = apart(squared_distances(changes), ~is_kept)
        scores = krum_scores(distances, jnp.maximum(number - faulty - 2, 1))
        best, last = jnp.argsort(scores)[:chosen], jnp.minimum(number, chosen)
        return jax.tree.map(lambda x: mean_between(x[best], 0, last), changes)

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
        most = _cohort(changes, 4 * faulty + 3, f"{faulty=}") - 2 * faulty
        is_kept = finite_clients(changes)
        number, changes = is_kept.sum(), masked(is_kept, changes)
        distances = apart(squared_distances(changes), ~is_kept)
        picked = chosen_one_by_one(distances, most, faulty, number)
        is_picked = jnp.arange(most) < jnp.maximum(number - 2 * faulty, 1)
        count = jnp.maximum(number - 4 * faulty, 1)
        return jax.tree.map(lambda x: near_median(x[picked], is_picked, count), changes)

    return combine


def krum_scores(distances: jax.Array, count) -> jax.Array:
    """Sums of the `count` smallest distances [K, K] to others, [K]."""
    number = len(distances)
    others = jnp.where(jnp.eye(number, dtype=bool), jnp.inf, distances)
    is_near = jnp.arange(number) < count
    return jnp.where(is_near, jnp.sort(others, axis=1), 0).sum(axis=1)


def chosen_one_by_one(
    distances: jax.Array, count: int, faulty: int, number=None
) -> jax.Array:
    """Indices [count] of Krum's choices, each among the clients not chosen yet.

    Args:
      number: how many of the clients of `distances` [K, K] there are; None is all.
    """
    number, chosen = len(distances) if number is None else number, []
    for taken in range(count):
        nearest = jnp.maximum(number - taken - faulty - 2, 1)
        best = jnp.argmin(krum_scores(distances, nearest))
        chosen.append(best)
        distances = apart(distances, jnp.arange(len(distances)) == best)
    return jnp.stack(chosen)


def apart(distances: jax.Array, is_out: jax.Array) -> jax.Array:
    """`distances` [K, K] that are infinite from and to some clients [K]."""
    return jnp.where(is_out[:, None] | is_out[None], jnp.inf, distances)


def median_of(x: jax.Array, is_kept: jax.Array) -> jax.Array:
    """Per coordinate of x [K, ...], the median of the values that are kept [K]."""
    ordered, number = jnp.sort(masked(is_kept, x, jnp.inf), axis=0), is_kept.sum()
    return ordered[(number - 1) // 2] * 0.5 + ordered[number // 2] * 0.5


def near_median(x: jax.Array, is_kept: jax.Array, count: jax.Array) -> jax.Array:
    """Per coordinate of x [K, ...], the mean of `count` kept values near the median."""
    away = masked(is_kept, jnp.abs(x - median_of(x, is_kept)[None]), jnp.inf)
    nearest = jnp.take_along_axis(x, jnp.argsort(away, axis=0), axis=0)
    return mean_between(nearest, 0, count)


def _cohort(changes: PyTree, least: int, settings: str) -> int:
    number = len(jax.tree.leaves(changes)[0])
    if number < least:
        raise ValueError(
            f"federation.cohort_size must be at least {least} for {settings}, got "
            f"{number}. Choose a larger cohort or a smaller `faulty`."
        )
    return number
