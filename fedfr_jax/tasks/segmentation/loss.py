"""Segmentation loss of a client: cross-entropy of pixels."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.losses.masked_means import masked_mean
from fedfr_jax.ranges import NonNegative
from fedfr_jax.schema import checked
from fedfr_jax.types import Model


def pixel_cross_entropy(
    model: Model, *, class_weights: tuple[NonNegative, ...] = ()
) -> Callable:
    """Mean pixel cross entropy: `mean_pixel_loss` of it."""
    return mean_pixel_loss(model, entropies, class_weights=class_weights)


def mean_of_pixels(
    model: Model, loss: Callable, *, class_weights: tuple[NonNegative, ...] = ()
) -> Callable:
    """`mean_pixel_loss` of a loss on outputs [N, M] and targets [N]."""
    return mean_pixel_loss(model, pixel_losses(loss), class_weights=class_weights)


@checked
def mean_pixel_loss(
    model: Model,
    values_of: Callable,
    *,
    class_weights: tuple[NonNegative, ...] = (),
) -> Callable:
    """Mean loss of pixels over the valid examples, as `LocalTraining.loss`.

    Pixels whose number in targets["mask"] [B, H, W] is no class of the model, such as
    `types.IGNORE_INDEX` or -1, count for nothing; a batch without a pixel that counts
    has the loss 0.

    Args:
      model: gives logits [B, H, W, M].
      values_of: (logits [B, H, W, M], classes [B, H, W]) -> [B, H, W].
      class_weights: a pixel counts by that of its class, >= 0, M of them; () counts
        all alike. As in PyTorch, the mean is over the weights of the pixels.

    Returns:
      loss(variables, batch, key) -> (mean [], (batch_stats, {"accuracy": []})).

    Raises:
      ValueError: for weights that are not one per class, or all 0.
    """
    num_classes = model.embedding_dim
    weights = class_weights or (1.0,) * num_classes
    if len(weights) != num_classes or not any(weights):
        raise ValueError(
            f"class_weights must have {num_classes} entries, one per class and not all "
            f"0, got {class_weights}."
        )

    def loss_fn(variables, batch, key):
        logits, stats = model.apply(variables, batch.images, True, key=key)
        if jnp.finfo(logits.dtype).bits < 32:
            logits = logits.astype(jnp.float32)
        mask = batch.targets["mask"].astype(jnp.int32)
        counts = (mask >= 0) & (mask < num_classes) & batch.is_valid[:, None, None]
        target = jnp.where(counts, mask, 0)
        values = values_of(logits, target)
        one_hot = jax.nn.one_hot(target, num_classes, dtype=values.dtype)
        weight = jnp.where(counts, one_hot @ jnp.array(weights, values.dtype), 0)
        total = jnp.where(weight > 0, values * weight, 0).sum()
        mean = total / jnp.where(weight.sum() > 0, weight.sum(), 1)
        is_right = (logits.argmax(axis=-1) == mask).astype(values.dtype)
        accuracy = masked_mean(is_right, counts)
        return mean, (stats, {"accuracy": accuracy})

    return loss_fn


def pixel_losses(loss: Callable) -> Callable:
    """Apply a loss on outputs [N, M] and targets [N] to pixels, [B, H, W, M]."""

    def values_of(logits, target):
        rows = logits.reshape(-1, logits.shape[-1])
        return loss(rows, target.reshape(-1)).reshape(target.shape)

    return values_of


def entropies(logits: jax.Array, target: jax.Array) -> jax.Array:
    """Cross entropy [B, H, W] of logits [B, H, W, M]."""
    target = jax.nn.one_hot(target, logits.shape[-1], dtype=logits.dtype)
    return optax.softmax_cross_entropy(logits, target)
