"""Terms that methods add to a client's loss: a pull to an anchor, a push of the drift.

All wrap a client's training and take their tree as a keyword of the loss. Leaves that
stay with a client, which the tree lacks, are neither pulled nor pushed. A push is in
the gradient alone: the loss that is told stays that of the examples.
"""

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.federated import collections
from fedfr_jax.federated.algorithms.gradients import shared_gradient
from fedfr_jax.objective import with_aux
from fedfr_jax.schema import check_ranges
from fedfr_jax.types import Local


def proximal(local: Local, strength: float) -> Local:
    """Loss + strength / 2 ||params - anchor||^2; `anchor` is like the shared params.

    `pull` [], another keyword of the loss, is a client's own factor of the strength.

    The gradient gains `strength * (params - anchor)`: FedProx, arXiv:1812.06127,
    equation 2; Ditto and pFedMe pull a personal model alike.

    Raises:
      ValueError: when `strength` is negative.
    """
    check_ranges("", {"strength": strength}, {"strength": (0, jnp.inf)})
    loss_fn = with_aux(local.loss)

    def loss_near(variables, batch, key, *, anchor, pull=1.0, **round_args):
        loss, aux = loss_fn(variables, batch, key, **round_args)
        params = collections.like(anchor, variables["params"])
        apart = jax.tree.map(jnp.subtract, params, anchor)
        distance = jnp.asarray(optax.tree.norm(apart, squared=True))
        penalty = 0.5 * strength * pull * distance.astype(loss.dtype)
        return loss + penalty, aux

    return local._replace(loss=loss_near)


def corrected(local: Local) -> Local:
    """Gradient + correction, that of <correction, params>, like the shared params.

    SCAFFOLD's `c - c_k`, FedDANE's `mean gradient - own gradient`.
    """
    loss_fn = with_aux(local.loss)

    def loss_plus(variables, batch, key, *, correction, **round_args):
        loss, aux = loss_fn(variables, batch, key, **round_args)
        params = collections.like(correction, variables["params"])
        return loss + _pushed(correction, params).astype(loss.dtype), aux

    return local._replace(loss=loss_plus)


def less_of_anchor(local: Local) -> Local:
    """Gradient - that of the batch at `anchor`: Mime's variance reduction.

    `anchor` is like the shared params. The gradient is of the same batch under the same
    key, and held fixed.
    """
    loss_fn, gradient = with_aux(local.loss), shared_gradient(local)

    def loss_less(variables, batch, key, *, anchor, **round_args):
        loss, aux = loss_fn(variables, batch, key, **round_args)
        own = collections.without(anchor, variables["params"])
        start = {**variables, "params": collections.join(anchor, own)}
        at_anchor = jax.lax.stop_gradient(gradient(start, batch, key))
        at_anchor = collections.like(anchor, at_anchor)
        params = collections.like(anchor, variables["params"])
        return loss - _pushed(at_anchor, params).astype(loss.dtype), aux

    return local._replace(loss=loss_less)


def _pushed(direction, params) -> jax.Array:
    """0, whose gradient is the direction."""
    product = jnp.asarray(optax.tree.vdot(direction, params))
    return product - jax.lax.stop_gradient(product)
