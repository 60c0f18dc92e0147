"""Cross-entropy of a classifier, as the loss of a client."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.losses.masks import masked_mean
from fedfr_jax.types import Model


def cross_entropy(model: Model, *, label_smoothing: float = 0.0) -> Callable:
    """Loss of `Local`: softmax cross-entropy over the batch's valid examples.

    Args:
      model: gives logits [B, M].
      label_smoothing: share of every label that is spread over all classes, in [0, 1).

    Returns:
      loss(variables, batch, key) -> (mean [], (batch_stats, {"accuracy": []})).

    Raises:
      ValueError: when label_smoothing is out of range.
    """
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must lie in [0, 1), got {label_smoothing}.")

    def loss_fn(variables, batch, key):
        logits, stats = model.apply(variables, batch.images, True, key=key)
        if jnp.finfo(logits.dtype).bits < 32:
            logits = logits.astype(jnp.float32)
        target = jax.nn.one_hot(batch.labels, logits.shape[1], dtype=logits.dtype)
        target = optax.smooth_labels(target, label_smoothing)
        values = optax.softmax_cross_entropy(logits, target)
        is_right = logits.argmax(axis=1) == batch.labels
        accuracy = masked_mean(is_right.astype(values.dtype), batch.is_valid)
        value = masked_mean(values, batch.is_valid)
        return value, (stats, {"accuracy": accuracy})

    return loss_fn
