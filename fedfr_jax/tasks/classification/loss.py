"""Classification losses of a client."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.losses.masked_means import masked_mean
from fedfr_jax.losses.spreadout import class_hinge
from fedfr_jax.ranges import BelowOne, Cosine
from fedfr_jax.schema import checked
from fedfr_jax.tasks.contrastive import check_features
from fedfr_jax.types import Batch, Model


@checked
def cross_entropy(model: Model, *, label_smoothing: BelowOne = 0.0) -> Callable:
    """Softmax cross entropy over the batch's valid examples, as `LocalTraining.loss`.

    Args:
      model: gives logits [B, M].
      label_smoothing: share of every label that is spread over all classes, in [0, 1).
    """
    return mean_loss(model, partial(with_smoothing, label_smoothing=label_smoothing))


def mean_loss(model: Model, values_of: Callable) -> Callable:
    """Build a client's loss from values of examples.

    Args:
      values_of: (logits [B, M], labels [B]) -> [B].
    """

    def loss_fn(variables, batch, key):
        logits, stats = model.apply(variables, batch.model_inputs, True, key=key)
        value, accuracy = with_metrics(logits, batch, values_of)
        return value, (stats, {"accuracy": accuracy})

    return loss_fn


def with_smoothing(
    logits: jax.Array, labels: jax.Array, label_smoothing: float = 0.0
) -> jax.Array:
    """Cross-entropy [B] of logits [B, M]."""
    target = jax.nn.one_hot(labels, logits.shape[1], dtype=logits.dtype)
    target = optax.smooth_labels(target, label_smoothing)
    return optax.softmax_cross_entropy(logits, target)


def with_metrics(
    logits: jax.Array, batch: Batch, values_of: Callable = with_smoothing
) -> tuple[jax.Array, jax.Array]:
    """(mean loss [], accuracy []) of logits [B, M], in float32 or more."""
    if jnp.finfo(logits.dtype).bits < 32:
        logits = logits.astype(jnp.float32)
    values = values_of(logits, batch.labels)
    is_right = logits.argmax(axis=1) == batch.labels
    accuracy = masked_mean(is_right.astype(values.dtype), batch.is_valid)
    return masked_mean(values, batch.is_valid), accuracy


@checked
def class_pull(model: Model, *, target_cosine: Cosine = 0.9) -> Callable:
    """FedAwS's loss: pulls features to the class vector of their label.

    Args:
      model: its last block is a linear classifier, whose kernel [D, M] has the rows.
      target_cosine: cosine from which the loss is zero, in [-1, 1].

    Returns:
      loss(variables, batch, key) -> (mean [], (batch_stats, {"accuracy": []})).

    Raises:
      ValueError: when the network has no features.
    """
    check_features(model, "fedaws")

    def loss_fn(variables, batch, key):
        logits, seen, stats = model.apply_with_features(
            variables, batch.model_inputs, True, key=key
        )
        rows = variables["params"][model.blocks[-1]]["kernel"].T
        values = class_hinge(seen, rows[batch.labels], target=target_cosine)
        accuracy = with_metrics(logits, batch)[1]
        value = masked_mean(values, batch.is_valid)
        return value, (stats, {"accuracy": accuracy})

    return loss_fn
