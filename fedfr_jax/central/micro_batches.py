"""Gradients of a batch, a part of it at a time: less memory, the same mean.

Batch statistics are those of a part (ghost batch normalisation, Hoffer et al. 2017,
arXiv:1705.08741) and move with every one of them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.central.batches import CUT
from fedfr_jax.types import Batch, PyTree


def accumulated(
    gradient: Callable, variables: PyTree, batch: Batch, key: jax.Array, count: int
) -> tuple[PyTree, PyTree, PyTree]:
    """(gradients, statistics, metrics with the loss), means over `count` parts.

    Args:
      gradient: (params, stats, batch, key) -> ((loss, (stats, metrics)), gradients).
      batch: of a device; `count` divides its size.
    """
    params, stats = variables["params"], variables["batch_stats"]
    if count == 1:
        (loss, (stats, metrics)), grads = gradient(params, stats, batch, key)
        return grads, stats, {"loss": loss, **metrics}

    def one(carry, part):
        sums, stats = carry
        number, batch = part
        own = jax.random.fold_in(key, number)
        (loss, (stats, metrics)), grads = gradient(params, stats, batch, own)
        return (jax.tree.map(jnp.add, sums, grads), stats), {"loss": loss, **metrics}

    start = jax.tree.map(jnp.zeros_like, params), stats
    parts = jnp.arange(count, dtype=jnp.int32), _parts(batch, count)
    (sums, stats), metrics = jax.lax.scan(one, start, parts)
    grads = jax.tree.map(lambda x: x / count, sums)
    return grads, stats, jax.tree.map(lambda x: x.mean(0), metrics)


def _parts(batch, count):
    """`batch` as [count, B / count, ...]; what is no example's comes with all."""

    def split(tree, spec):
        if not any(spec):
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), tree)
        return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), tree)

    return Batch(*map(split, batch, CUT))
