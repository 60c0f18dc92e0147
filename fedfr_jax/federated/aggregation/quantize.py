"""Stochastic quantization of updates."""

import jax
import jax.numpy as jnp

from fedfr_jax.federated.aggregation.contract import keep, no_state, split
from fedfr_jax.schema import check_ranges
from fedfr_jax.types import Aggregator, Summary


def stochastic_quantize(*, bits: int = 8) -> Aggregator:
    """Every leaf on 2^bits equal steps from its least to its largest number.

    Suresh et al. 2017, arXiv:1611.00429, section 2.2 (k-level): a number goes to one of
    the two levels around it by chance, so that its expectation is the number itself.
    The server sees the levels' values; no byte is counted less for it.

    Args:
      bits: of a number, in [1, 23], as many as float32 keeps exactly.

    Raises:
      ValueError: when `bits` is out of its range.
    """
    check_ranges("", {"bits": bits}, {"bits": (1, 23)})

    def summarize(key, state, update, weight):
        del state
        change, statistics, join = split(update)
        keys = jax.random.split(key, max(len(change), 1))
        rounded = [quantize(k, x, bits) for k, x in zip(keys, change, strict=False)]
        return Summary(join(rounded, statistics), weight), {}

    return Aggregator(no_state, summarize, keep)


def quantize(key: jax.Array, x: jax.Array, bits: int) -> jax.Array:
    """`x` on levels from its least to its largest number, unbiased."""
    low = x.min()
    step = (x.max() - low) / (2**bits - 1)
    place = (x - low) / jnp.where(step > 0, step, 1)
    chance = jax.random.uniform(key, x.shape, x.dtype)
    return low + jnp.floor(place + chance) * step
