"""Combining models of which some may be faulty: functions of all K changes.

A member of COMBINES makes a function (changes, tree of [K, ...], examples [K]) -> tree
of [...]. A change with nan or infinity in any leaf is dropped first: the result is that
of the other clients alone, where K counts these. Median and trimmed mean: Yin et al.
2018, arXiv:1803.01498. Geometric median: Pillutla et al. 2019, arXiv:1912.13445,
algorithm 2. Krum and Bulyan: see `selection.py`.

None is streamed: K changes are kept, the memory of K models. An `Aggregator` sees a
change once, when its client ends, and each of Weiszfeld's iterations weighs all changes
by their distances to the centre that the one before has made. What makes one iteration
in a round, from the last round's centre, streams: see `weiszfeld.py`, and centred
clipping in `clipping.py`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.federated.algorithms.aggregators import WEIGHTS
from fedfr_jax.federated.algorithms.distances import (
    distances_to,
    finite_clients,
    masked,
    mean_between,
)
from fedfr_jax.federated.algorithms.selection import bulyan, krum, median_of
from fedfr_jax.schema import POSITIVE, check_choice, check_ranges


def median() -> Callable:
    """The median over clients of every coordinate."""

    def combine(changes, examples):
        del examples
        is_kept = finite_clients(changes)
        return jax.tree.map(lambda x: median_of(x, is_kept), changes)

    return combine


def trimmed_mean(*, fraction: float = 0.1) -> Callable:
    """Mean without the largest and smallest floor(fraction K) of every coordinate.

    Raises:
      ValueError: when `fraction` is outside [0, 0.5).
    """
    if not 0 <= fraction < 0.5:
        raise ValueError(f"fraction must lie in [0, 0.5), got {fraction}.")

    def combine(changes, examples):
        del examples
        is_kept = finite_clients(changes)
        number = is_kept.sum()
        cut = jnp.array([int(fraction * k) for k in range(len(is_kept) + 1)])[number]
        ordered = jax.tree.map(
            lambda x: jnp.sort(x, axis=0), masked(is_kept, changes, jnp.inf)
        )
        return jax.tree.map(lambda x: mean_between(x, cut, number - cut), ordered)

    return combine


def geometric_median(
    *, iterations: int = 10, smoothing: float = 1e-6, weigh: str = "equally"
) -> Callable:
    """The point of least mean distance to all, by Weiszfeld's iterations from the mean.

    Args:
      iterations: each goes over all changes, which are kept as they are. The released
        code takes at most 4, with a smoothing of 1e-5, and stops when they gain little.
      smoothing: least distance by which a change is weighed, > 0.
      weigh: equally, or examples, as the paper and its code: both means are weighted by
        what clients say that they have, which a faulty one may overstate.

    Raises:
      ValueError: when a number is out of its range, or for an unknown word.
    """
    bounds = {"iterations": (1, jnp.inf), "smoothing": POSITIVE}
    check_ranges("", {"iterations": iterations, "smoothing": smoothing}, bounds)
    check_choice("weigh", weigh, WEIGHTS)

    def combine(changes, examples):
        counts = examples if weigh == "examples" else jnp.ones_like(examples)
        is_kept = finite_clients(changes)
        counts = jnp.where(is_kept, counts, 0).astype(jnp.result_type(float))
        changes = masked(is_kept, changes)

        def mean(weights):
            share = weights / weights.sum()
            average = lambda x: jnp.tensordot(share.astype(x.dtype), x, axes=1)
            return jax.tree.map(average, changes)

        def step(_, center):
            distances = jnp.maximum(distances_to(center, changes), smoothing)
            return mean(counts.astype(distances.dtype) / distances)

        return jax.lax.fori_loop(0, iterations, step, mean(counts))

    return combine


COMBINES = {
    "bulyan": bulyan,
    "geometric_median": geometric_median,
    "krum": krum,
    "median": median,
    "trimmed_mean": trimmed_mean,
}
