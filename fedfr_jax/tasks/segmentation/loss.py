"""Cross-entropy of every pixel, as the loss of a client."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.losses.masks import masked_mean
from fedfr_jax.types import Model


def pixel_cross_entropy(model: Model) -> Callable:
    """Loss of `Local`: the mean over all pixels of a class of the valid examples.

    Pixels whose number in targets["mask"] [B, H, W] is no class of the model, such as
    `types.VOID`, count for nothing; a batch without a pixel that counts has loss 0.

    Args:
      model: gives logits [B, H, W, M].

    Returns:
      loss(variables, batch, key) -> (mean [], (batch_stats, {"accuracy": []})).
    """
    num_classes = model.embedding_dim

    def loss_fn(variables, batch, key):
        logits, stats = model.apply(variables, batch.images, True, key=key)
        if jnp.finfo(logits.dtype).bits < 32:
            logits = logits.astype(jnp.float32)
        mask = batch.targets["mask"].astype(jnp.int32)
        counts = (mask < num_classes) & batch.is_valid[:, None, None]
        # All zeros for a number that is no class.
        target = jax.nn.one_hot(mask, num_classes, dtype=logits.dtype)
        values = optax.softmax_cross_entropy(logits, target)
        is_right = (logits.argmax(axis=-1) == mask).astype(values.dtype)
        accuracy = masked_mean(is_right, counts)
        return masked_mean(values, counts), (stats, {"accuracy": accuracy})

    return loss_fn
