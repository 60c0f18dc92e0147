"""MOON's term beside the loss of any task whose networks give features."""

from collections.abc import Callable

import jax.numpy as jnp

from fedfr_jax.losses.contrastive import model_contrastive
from fedfr_jax.losses.masks import masked_mean
from fedfr_jax.schema import POSITIVE, check_ranges
from fedfr_jax.types import Model


def contrasted(
    loss: Callable,
    model: Model,
    *,
    contrastive_weight: float = 1.0,
    temperature: float = 0.5,
) -> Callable:
    """A row's loss + weight * `model_contrastive` of the network's features.

    Features of pixels are averaged over an image. The network is written twice, once
    for the loss: the compiler finds that both are one.

    Args:
      loss: of a row, (variables, batch, key) -> (scalar, (batch_stats, metrics)).
      contrastive_weight: mu >= 0.
      temperature: > 0.

    Returns:
      loss(variables, batch, key, *, received, previous), whose last two are variables.

    Raises:
      ValueError: when a number is out of range.
    """
    values = {"contrastive_weight": contrastive_weight, "temperature": temperature}
    bounds = {"contrastive_weight": (0, jnp.inf), "temperature": POSITIVE}
    check_ranges("", values, bounds)

    def features(variables, batch, train, key=None):
        found = model.features(variables, batch.images, train, key=key)[1]
        return found.reshape(len(found), -1, found.shape[-1]).mean(axis=1)  # [B, D]

    def loss_fn(variables, batch, key, *, received, previous):
        value, (stats, metrics) = loss(variables, batch, key)
        terms = model_contrastive(
            features(variables, batch, True, key),
            features(received, batch, False),
            features(previous, batch, False),
            temperature=temperature,
        )
        term = masked_mean(terms, batch.is_valid)
        total = value + contrastive_weight * term
        return total, (stats, {**metrics, "contrastive": term})

    return loss_fn
