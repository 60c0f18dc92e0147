"""Leaves that training does not move, such as the head of FedBABU."""

import jax
import optax

from fedfr_jax import trees
from fedfr_jax.federated.packing import Packed, pack, unpack
from fedfr_jax.types import Local


def frozen(local: Local, pattern: str) -> Local:
    """`local` whose steps leave the params that `pattern` finds where they are.

    Args:
      local: its optimizer is a function of the rate.
      pattern: regular expression over leaf paths such as `params/head`, which need not
        be among those that a phase of training moves.
    """
    hold = trees.still(optax.identity(), pattern, least=0).update

    def at(rate):
        inner = local.optimizer(rate)

        def update(grads, state, params=None):
            steps, state = inner.update(grads, state, params)
            held, _ = hold(unpack(steps), optax.EmptyState())
            return _packed_like(held, steps), state

        return optax.GradientTransformation(inner.init, update)

    return local._replace(optimizer=at)


def _packed_like(tree, like):
    """`tree` with those collections packed that are so in `like`."""
    is_packed = lambda x: isinstance(x, Packed)
    each = lambda own, part: pack(part) if is_packed(own) else part
    return jax.tree.map(each, like, tree, is_leaf=is_packed)
