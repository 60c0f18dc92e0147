"""Masked means over examples."""

import jax
import jax.numpy as jnp

from fedfr_jax.types import Batch

# Key of the targets of a micro-batch or batch shard: [B], the whole batch's fraction of
# valid examples.
COUNTED = "counted"


def masked_mean(values: jax.Array, is_valid: jax.Array) -> jax.Array:
    """Mean [] of values [...] over the valid ones; 0 if none is valid."""
    count = jnp.maximum(is_valid.sum(), 1).astype(values.dtype)
    return jnp.where(is_valid, values, 0).sum() / count


def valid_classes(
    num_own: int, num_classes: jax.Array, num_public: int = 0
) -> jax.Array:
    """Mask [M + M_g]: the client's `num_classes` of M, and all public classes."""
    is_own_class = jnp.arange(num_own, dtype=jnp.int32) < num_classes
    return jnp.concatenate([is_own_class, jnp.ones(num_public, bool)])


def masked_part_mean(values: jax.Array, batch: Batch) -> jax.Array:
    """`masked_mean` [] of values [B], weighted by `masked_fraction`.

    The mean of these over equal parts of a batch with COUNTED is the mean over the
    valid examples of the whole batch.
    """
    return masked_mean(values, batch.is_valid) * masked_fraction(batch, batch.is_valid)


def masked_fraction(batch: Batch, is_valid: jax.Array) -> jax.Array | float:
    """Weight of a part's mean in the mean over the batch; 1 for a whole batch."""
    if COUNTED not in batch.targets:
        return 1.0
    share = batch.targets[COUNTED][0]
    return is_valid.sum().astype(share.dtype) / (share * is_valid.size)
