"""The loss of a training, whoever wrote it, in the form that is differentiated."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.convolutions import fast


def as_aux_loss(loss: Callable) -> Callable:
    """Convert a loss of `LocalTraining` to one with (scalar, (stats, metrics)).

    Its convolutions and pooling are those of `convolutions.fast`.
    """

    @fast
    def full(variables, batch, key, **round_args):
        value = loss(variables, batch, key, **round_args)
        value, aux = value if isinstance(value, tuple) else (value, {})
        if shape := jnp.shape(value):
            raise ValueError(f"loss must return a mean [] of the batch, got {shape}.")
        if not isinstance(aux, tuple):
            aux = variables["batch_stats"], aux
        return value, aux

    return full


def example_losses(loss_fn: Callable, variables, batch, key) -> jax.Array:
    """Loss of every example of a batch, [B]; that of padding is meaningless.

    A network that does not use `is_valid` runs once, forward and backward.

    Args:
      loss_fn: of `as_aux_loss`, a mean over the batch's valid examples.
    """
    only = jnp.eye(len(batch.is_valid), dtype=bool)
    loss = lambda mask: loss_fn(variables, batch._replace(is_valid=mask), key)[0]
    return jax.vmap(loss)(only)
