"""Losses by domain, a part of all examples, for agnostic averaging (afl.py)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.objective import example_losses


def weighted(loss_fn: Callable, domain_of: Callable) -> Callable:
    """Mean loss of a batch whose examples count by the `weights` [D] of their domains.

    Args:
      loss_fn: (variables, batch, key) -> (mean over the valid examples, aux).
      domain_of: batch -> [B] int32 in [0, D).
    """

    def loss(variables, batch, key, *, weights):
        losses = example_losses(loss_fn, variables, batch, key)
        values = jnp.where(batch.is_valid, losses * weights[domain_of(batch)], 0)
        mean = values.sum() / jnp.maximum(batch.is_valid.sum(), 1).astype(values.dtype)
        return mean, loss_fn(variables, batch, key)[1]

    return loss


def by_domain(loss_fn: Callable, domain_of: Callable, num_domains: int) -> Callable:
    """Sum of losses [D] and number of examples [D], both over a batch's size."""

    def sums(variables, batch, key):
        domains = jnp.arange(num_domains, dtype=jnp.int32)
        is_of = domain_of(batch)[:, None] == domains[None]
        is_of &= batch.is_valid[:, None]
        losses = example_losses(loss_fn, variables, batch, key)
        of_batch = jnp.where(is_of, losses[:, None], 0).sum(0), is_of.sum(0)
        size = jnp.maximum(batch.is_valid.sum(), 1).astype(losses.dtype)
        return jax.tree.map(lambda x: x.astype(losses.dtype) / size, of_batch)

    return sums
