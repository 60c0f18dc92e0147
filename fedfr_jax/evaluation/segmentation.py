"""Segmentation metrics: IoU by a confusion matrix, entropies of outputs and features.

Intersection over union, Everingham et al., "The Pascal Visual Object Classes (VOC)
Challenge", IJCV 2010, section 4.3, is taken over all pixels of the test images
together, not the mean over images. A class that neither truth nor prediction has is
left out of the mean.

Entropies: Michieli, Toldo, Ozay, "FedMargin" (preprint arXiv:2105.08982). Shannon
entropy of a pixel over its classes, and over the channels of its features, normalized
to sum 1; that negative features are clipped to 0 before is ours. Natural logarithms: in
[0, ln M] and [0, ln D].
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np


class SegmentationScores(NamedTuple):
    """IoU per class, mean IoU and pixel accuracy; nan for classes without pixels."""

    iou: np.ndarray  # [M] in [0, 1], nan of classes without pixels
    mean_iou: float  # of the classes with pixels
    pixel_accuracy: float


def confusion_matrix(
    truth: jax.Array, predicted: jax.Array, num_classes: int
) -> jax.Array:
    """Confusion matrix of pixels, [M, M] int32: truth in rows, predictions across.

    Args:
      truth: [...] int; pixels of no class (`types.IGNORE_INDEX`) are left out.
      predicted: [...] int in [0, M), the same shape.
    """
    chex.assert_equal_shape((truth, predicted))
    truth, predicted = truth.astype(jnp.int32), predicted.astype(jnp.int32)
    is_known = (truth >= 0) & (truth < num_classes)
    cell = jnp.where(is_known, truth * num_classes + predicted, num_classes**2)
    counts = jnp.zeros(num_classes**2 + 1, jnp.int32).at[cell.ravel()].add(1)
    return counts[:-1].reshape(num_classes, num_classes)


def segmentation_scores(counts: np.ndarray) -> SegmentationScores:
    """Compute the metrics of a confusion matrix [M, M]."""
    counts = np.asarray(counts)
    right = np.diag(counts).astype(np.float64)
    union = counts.sum(0) + counts.sum(1) - right
    is_seen = union > 0
    iou = np.full(len(counts), np.nan)
    iou[is_seen] = right[is_seen] / union[is_seen]
    if not is_seen.any():
        return SegmentationScores(iou, float("nan"), float("nan"))
    return SegmentationScores(
        iou, float(iou[is_seen].mean()), float(right.sum() / counts.sum())
    )


MIN_PROBABILITY = 1e-12  # added to a sum of channels


def softmax_entropy(logits: jax.Array) -> jax.Array:
    """Entropy [...] of the softmax of logits [..., M]."""
    log_p = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def feature_entropy(features: jax.Array) -> jax.Array:
    """Entropy [...] over the channels of features [..., D]; 0 if all are 0."""
    values = jnp.maximum(features, 0)
    share = values / (values.sum(axis=-1, keepdims=True) + MIN_PROBABILITY)
    logs = jnp.log(jnp.where(share > 0, share, 1))
    return -jnp.sum(share * logs, axis=-1)


def resize_map(values: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Resize maps [B, h, w] to the size (H, W) bilinearly."""
    return jax.image.resize(values, (len(values), *size), "bilinear")
