"""Re-identification loss of a client: identity and triplet terms."""

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from fedfr_jax.losses.margin import smoothed_cross_entropy
from fedfr_jax.losses.masked_means import masked_mean
from fedfr_jax.losses.triplet import triplet
from fedfr_jax.ranges import BelowOne, NonNegative
from fedfr_jax.schema import checked
from fedfr_jax.types import Model


@checked
def reid_loss(
    model: Model,
    *,
    identity_weight: NonNegative = 1.0,
    label_smoothing: BelowOne = 0.0,
    smoothing_over: Literal["all", "others"] = "all",
    triplet_weight: NonNegative = 0.0,
    triplet_mining: Literal["hard", "weighted"] = "hard",
    triplet_metric: Literal["euclid", "cosine"] = "euclid",
    triplet_margin: NonNegative | None = 0.3,
) -> Callable:
    """Cross entropy over a client's identities, and triplets, as `LocalTraining.loss`.

    Rows that pad a batch and classes that pad the classifier count for nothing; a batch
    of central training, whose `num_classes` is 0, has all classes.

    Args:
      model: gives logits [B, M], and features for the triplets.
      identity_weight, triplet_weight: of the two terms, at least 0; 0 leaves one out.
      label_smoothing, smoothing_over: see `smoothed_cross_entropy`.
      triplet_mining, triplet_metric, triplet_margin: see `triplet`, the margin at
        least 0; their batches should have several images of each identity, see the
        method's key `identities_per_batch`.

    Returns:
      loss(variables, batch, key) -> (loss [], (batch_stats, {"identity_loss",
      "accuracy", perhaps "triplet_loss"})).

    Raises:
      ValueError: for two weights of 0.
    """
    if not identity_weight and not triplet_weight:
        raise ValueError(
            "identity_weight or triplet_weight must be above 0, got 0 for both."
        )

    features_fn = model.features

    def identity(logits, batch):
        number = jnp.arange(logits.shape[1], dtype=jnp.int32)
        mask = (number < batch.num_classes) | (batch.num_classes == 0)
        smoothing = {"smoothing": label_smoothing, "spread": smoothing_over}
        values = smoothed_cross_entropy(logits, batch.labels, mask, **smoothing)
        best = jnp.where(mask[None], logits, -jnp.inf).argmax(axis=1)
        is_right = (best == batch.labels).astype(values.dtype)
        is_valid = batch.is_valid
        return masked_mean(values, is_valid), masked_mean(is_right, is_valid)

    def loss_fn(variables, batch, key):
        outputs = features_fn(variables, batch.model_inputs, True, key=key)
        logits, features, stats = outputs
        value, accuracy = identity(logits, batch)
        metrics = {"identity_loss": value, "accuracy": accuracy}
        total = identity_weight * value
        if triplet_weight:
            values, counts = triplet(
                features,
                batch.labels,
                batch.is_valid,
                mining=triplet_mining,
                metric=triplet_metric,
                margin=triplet_margin,
            )
            metrics["triplet_loss"] = masked_mean(values, counts)
            total = total + triplet_weight * metrics["triplet_loss"]
        return total, (stats, metrics)

    return loss_fn
