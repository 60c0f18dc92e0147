"""Terms that methods add to a client's loss: a pull to an anchor, a push of the drift.

Both wrap a client's training and take their tree as a keyword of the loss. Leaves that
stay with a client, which the tree lacks, are neither pulled nor pushed.
"""

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.federated import collections
from fedfr_jax.objective import with_aux
from fedfr_jax.types import Local


def proximal(local: Local, strength: float) -> Local:
    """Loss + strength / 2 ||params - anchor||^2; `anchor` is like the shared params.

    The gradient gains `strength * (params - anchor)`: FedProx, arXiv:1812.06127,
    equation 2; Ditto and pFedMe pull a personal model alike.
    """
    loss_fn = with_aux(local.loss)

    def loss_near(variables, batch, key, *, anchor, **round_args):
        loss, aux = loss_fn(variables, batch, key, **round_args)
        params = collections.like(anchor, variables["params"])
        apart = jax.tree.map(jnp.subtract, params, anchor)
        penalty = 0.5 * strength * optax.tree.norm(apart, squared=True)
        return loss + penalty.astype(loss.dtype), aux

    return local._replace(loss=loss_near)


def corrected(local: Local) -> Local:
    """Loss + <correction, params>; `correction` is like the shared params.

    The gradient gains the correction itself: SCAFFOLD's `c - c_k`, FedDANE's
    `mean gradient - own gradient`.
    """
    loss_fn = with_aux(local.loss)

    def loss_plus(variables, batch, key, *, correction, **round_args):
        loss, aux = loss_fn(variables, batch, key, **round_args)
        params = collections.like(correction, variables["params"])
        push = jnp.asarray(optax.tree.vdot(correction, params))
        return loss + push.astype(loss.dtype), aux

    return local._replace(loss=loss_plus)
