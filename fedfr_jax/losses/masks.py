"""Averages of the examples that count."""

import jax
import jax.numpy as jnp


def masked_mean(values: jax.Array, is_valid: jax.Array) -> jax.Array:
    """Mean [] of values [...] over the valid ones, of any shape; 0 when none is."""
    count = jnp.maximum(is_valid.sum(), 1).astype(values.dtype)
    return jnp.where(is_valid, values, 0).sum() / count
