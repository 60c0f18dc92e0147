"""What a loss may return, as one form, and the losses of single examples."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def with_aux(loss: Callable) -> Callable:
    """A loss of `Local` as one that always gives (scalar, (batch_stats, metrics))."""

    def full(variables, batch, key, **round_args):
        value = loss(variables, batch, key, **round_args)
        value, aux = value if isinstance(value, tuple) else (value, {})
        if not isinstance(aux, tuple):
            aux = variables["batch_stats"], aux
        return value, aux

    return full


def example_losses(loss_fn: Callable, variables, batch, key) -> jax.Array:
    """Loss of every example of a batch, [B]; padding has one too, without meaning.

    A network that does not look at `is_valid` runs once, forward and backward.

    Args:
      loss_fn: as `with_aux` gives it, a mean over the batch's valid examples.
    """
    only = jnp.eye(len(batch.is_valid), dtype=bool)
    loss = lambda mask: loss_fn(variables, batch._replace(is_valid=mask), key)[0]
    return jax.vmap(loss)(only)
