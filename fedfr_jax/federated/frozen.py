"""Leaves that training does not move, such as the head of FedBABU."""

import jax
import jax.numpy as jnp
import optax

from fedfr_jax import stacks, trees
from fedfr_jax.types import Local


def frozen(local: Local, pattern: str) -> Local:
    """`local` whose steps leave the params that `pattern` finds where they are.

    Args:
      local: its optimizer is a function of the rate.
      pattern: regular expression over leaf paths such as `params/head`, which need not
        be among those that a phase of training moves.
    """
    find = trees.matching(pattern, least=0)

    def at(rate):
        inner = local.optimizer(rate)

        def update(grads, state, params=None):
            steps, state = inner.update(grads, state, params)
            named = {"params": stacks.named(steps)}
            still = lambda is_found, x: jnp.zeros_like(x) if is_found else x
            steps = jax.tree.map(still, find(named), named)["params"]
            return stacks.laid_out(steps, grads), state

        return optax.GradientTransformation(inner.init, update)

    return local._replace(optimizer=at)
