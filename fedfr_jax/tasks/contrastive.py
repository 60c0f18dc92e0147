"""MOON's contrastive term, added to the loss of any task."""

from collections.abc import Callable

import jax

from fedfr_jax.losses.contrastive import model_contrastive
from fedfr_jax.losses.masked_means import masked_mean
from fedfr_jax.ranges import NonNegative, Positive
from fedfr_jax.schema import checked
from fedfr_jax.types import Model


@checked
def with_contrastive_loss(
    loss_of: Callable,
    model: Model,
    *,
    contrastive_weight: NonNegative = 1.0,
    contrastive_temperature: Positive = 0.5,
) -> Callable:
    """Add weight * `model_contrastive` of the model's features to a method's loss.

    Features of pixels are averaged over an image; they are those of the network's
    projection where it has one. The network runs once: the loss is handed what it gave.
    The two models that are held fixed run as in evaluation, as in the authors' code.

    Args:
      loss_of: (model) -> loss of a row, which runs the model on the batch's images in
        training and no other way.
      contrastive_weight: mu >= 0, 5 for CIFAR-10 in the paper and 1 for CIFAR-100.
      contrastive_temperature: > 0.

    Returns:
      loss(variables, batch, key, *, received, previous), whose last two are variables.

    Raises:
      ValueError: when the network has no features.
    """
    check_features(model, "moon")
    loss_of(model)  # what is wrong with its settings is told before training

    def loss_fn(variables, batch, key, *, received, previous):
        output, features, stats = model.apply_with_features(
            variables, batch.model_inputs, True, key=key
        )
        known_model = model._replace(
            apply=lambda *_, **__: (output, stats),
            apply_with_features=lambda *_, **__: (output, features, stats),
        )
        value, (stats, metrics) = loss_of(known_model)(variables, batch, key)
        fixed = [
            model.apply_with_features(other, batch.model_inputs, False)[1]
            for other in (received, previous)
        ]
        terms = model_contrastive(
            *map(_embed_images, (features, *fixed)), temperature=contrastive_temperature
        )
        term = masked_mean(terms, batch.is_valid)
        total = value + contrastive_weight * term
        return total, (stats, {**metrics, "contrastive_loss": term})

    return loss_fn


def check_features(model: Model, algorithm: str) -> None:
    """Raise ValueError for a model without features."""
    if model.apply_with_features is None:
        raise ValueError(
            f"config.model.name must be a model with features for {algorithm}, got "
            "one without."
        )


def _embed_images(features: jax.Array) -> jax.Array:
    """Features [B, D] of [B, ..., D]: the mean over pixels, if any."""
    return features.reshape(len(features), -1, features.shape[-1]).mean(axis=1)
