"""Triplet loss over a batch, with hard mining.

Hermans, Beyer, Leibe 2017, "In Defense of the Triplet Loss", arXiv:1703.07737, equation
5 (batch hard) and section 2 (soft margin). The weighted mining is FastReID's
(arXiv:2006.02631, after Ristani and Tomasi, arXiv:1803.10859, section 3.2), with its
released weights: those of negatives sum to 1 only where some are near, because e^-d is
not scaled by the nearest. Deviation: where its soft margin overflows, FastReID takes a
margin of 0.3 for that batch; the logarithm here does not overflow.
"""

from typing import Literal

import chex
import jax
import jax.numpy as jnp

from fedfr_jax.losses.margin import cosine
from fedfr_jax.schema import checked

MIN_SQUARE = 1e-12  # of a Euclidean distance: at 0 the root has no slope
MIN_SUM = 1e-6  # added to a sum of weights


@checked
def distances(
    features: jax.Array, metric: Literal["euclid", "cosine"] = "euclid"
) -> jax.Array:
    """Pairwise distances [B, B] of features [B, D].

    euclid: sqrt(max(||a - b||^2, 1e-12)); cosine: 2 - 2 cos.
    """
    if metric == "cosine":
        return 2 - 2 * cosine(features, features)
    squares = jnp.sum(jnp.square(features), axis=1)
    inner = jnp.matmul(features, features.T, precision=jax.lax.Precision.HIGHEST)
    squares_apart = squares[:, None] + squares[None] - 2 * inner
    # By rounding, a row's distance from itself may differ from 0.
    squares_apart = jnp.where(jnp.eye(len(features), dtype=bool), 0, squares_apart)
    return jnp.sqrt(jnp.maximum(squares_apart, MIN_SQUARE))


@checked
def triplet(
    features: jax.Array,
    labels: jax.Array,
    is_valid: jax.Array,
    *,
    metric: Literal["euclid", "cosine"] = "euclid",
    mining: Literal["hard", "weighted"] = "hard",
    margin: float | None = 0.3,
) -> tuple[jax.Array, jax.Array]:
    """Triplet loss of each example, and whether it has a positive and a negative.

    A row's positives are the valid rows of its label, itself among them.

    Args:
      features: [B, D], as they come.
      labels: int [B].
      is_valid: bool [B]; other rows are neither anchors, nor positives nor negatives.
      metric: see `distances`.
      mining: hard takes the farthest positive and the nearest negative; weighted the
        means of all, where far positives and near negatives weigh more.
      margin: None for the soft margin, log(1 + e^(positive - negative)).

    Returns:
      (loss [B], bool [B]: valid rows with a negative in the batch).
    """
    chex.assert_rank([features, labels, is_valid], [2, 1, 1])
    distance = distances(features, metric)
    is_pair = is_valid[:, None] & is_valid[None]
    is_same = labels[:, None] == labels[None]
    positives, negatives = is_pair & is_same, is_pair & ~is_same
    if mining == "hard":
        positive = jnp.where(positives, distance, -jnp.inf).max(axis=1)
        negative = jnp.where(negatives, distance, jnp.inf).min(axis=1)
    else:
        positive = jnp.sum(distance * _weights(distance, positives), axis=1)
        negative = jnp.sum(distance * _weights(-distance, negatives), axis=1)
    counts = negatives.any(axis=1)  # an anchor is valid then, and its own positive
    excess = jnp.where(counts, positive, 0) - jnp.where(counts, negative, 0)
    if margin is None:
        return jax.nn.softplus(excess), counts
    return jnp.maximum(margin + excess, 0), counts


def _weights(scores, mask):
    """Softmax weights [B, B] of the scores over each row's mask, 0 outside it."""
    largest = jnp.where(mask, scores, 0).max(axis=1, keepdims=True)
    shares = jnp.where(mask, jnp.exp(jnp.where(mask, scores, 0) - largest), 0)
    return shares / (shares.sum(axis=1, keepdims=True) + MIN_SUM)
