"""Terms that methods add to a client's loss: a pull to an anchor, a push of the drift.

Both wrap a loss of `local_sgd` and take their tree as a keyword of the loss.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax


def proximal(loss_fn: Callable, strength: float) -> Callable:
    """`loss_fn` + strength / 2 ||params - anchor||^2; `anchor` is like params.

    The gradient gains `strength * (params - anchor)`: FedProx, arXiv:1812.06127,
    equation 2; Ditto and pFedMe pull a personal model alike.
    """

    def loss_near(variables, batch, key, *, anchor, **loss_args):
        loss, aux = loss_fn(variables, batch, key, **loss_args)
        apart = jax.tree.map(jnp.subtract, variables["params"], anchor)
        penalty = 0.5 * strength * optax.tree.norm(apart, squared=True)
        return loss + penalty.astype(loss.dtype), aux

    return loss_near


def corrected(loss_fn: Callable) -> Callable:
    """`loss_fn` + <correction, params>; `correction` is like params.

    The gradient gains the correction itself: SCAFFOLD's `c - c_k`, FedDANE's
    `mean gradient - own gradient`.
    """

    def loss_plus(variables, batch, key, *, correction, **loss_args):
        loss, aux = loss_fn(variables, batch, key, **loss_args)
        push = optax.tree.vdot(correction, variables["params"])
        return loss + push.astype(loss.dtype), aux

    return loss_plus
