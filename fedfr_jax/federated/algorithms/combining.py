"""Combining models of which some may be faulty: functions of all K changes.

A member of COMBINES makes a function (changes, tree of [K, ...]) -> tree of [...].
Median and trimmed mean: Yin et al. 2018, arXiv:1803.01498. Geometric median: Pillutla
et al. 2019, arXiv:1912.13445, algorithm 2, which goes over all changes in every
iteration and so keeps them. Krum and Bulyan: see `selection.py`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.federated.algorithms.selection import bulyan, distances_to, krum
from fedfr_jax.schema import POSITIVE, check_ranges


def median() -> Callable:
    """The median over clients of every coordinate."""
    return lambda changes: jax.tree.map(lambda x: jnp.median(x, axis=0), changes)


def trimmed_mean(*, fraction: float = 0.1) -> Callable:
    """Mean without the largest and smallest floor(fraction K) of every coordinate.

    Raises:
      ValueError: when `fraction` is outside [0, 0.5).
    """
    if not 0 <= fraction < 0.5:
        raise ValueError(f"fraction must lie in [0, 0.5), got {fraction}.")

    def trimmed(x):
        cut = int(fraction * len(x))
        return jnp.sort(x, axis=0)[cut : len(x) - cut].mean(axis=0)

    return lambda changes: jax.tree.map(trimmed, changes)


def geometric_median(*, iterations: int = 10, smoothing: float = 1e-6) -> Callable:
    """The point of least mean distance to all, by Weiszfeld's iterations from the mean.

    Args:
      iterations: each goes over all changes, which are kept as they are.
      smoothing: least distance by which a change is weighed, > 0.

    Raises:
      ValueError: when a number is out of its range.
    """
    bounds = {"iterations": (1, jnp.inf), "smoothing": POSITIVE}
    check_ranges("", locals(), bounds)

    def combine(changes):
        mean = lambda x: x.mean(axis=0)

        def step(_, center):
            weights = 1 / jnp.maximum(distances_to(center, changes), smoothing)
            weights /= weights.sum()
            average = lambda x: jnp.tensordot(weights.astype(x.dtype), x, axes=1)
            return jax.tree.map(average, changes)

        return jax.lax.fori_loop(0, iterations, step, jax.tree.map(mean, changes))

    return combine


COMBINES = {
    "bulyan": bulyan,
    "geometric_median": geometric_median,
    "krum": krum,
    "median": median,
    "trimmed_mean": trimmed_mean,
}
