"""Worst pairs of an evaluation, and a two-dimensional map of embeddings."""

import numpy as np

from fedfr_jax.types import EmbeddingMap


def worst_pairs(
    scores: np.ndarray, is_same: np.ndarray, count: int
) -> tuple[np.ndarray, float]:
    """Pairs on the wrong side of the most accurate threshold, farthest first.

    Args:
      scores: [P] cosines.
      is_same: [P] bool.
      count: largest number of pairs, half of them of each kind.

    Returns:
      (indices [n] into the pairs, the threshold with the fewest wrong pairs).
    """
    order = np.argsort(scores)
    # Wrong pairs when all but the k lowest are accepted, k = 0 .. P.
    wrong = np.sum(~is_same) + np.cumsum(np.where(is_same[order], 1, -1))
    lowest = int(np.argmin(wrong))
    above = scores[order[min(lowest + 1, len(order) - 1)]]
    threshold = float((scores[order[lowest]] + above) / 2)
    rejected = np.flatnonzero(is_same & (scores <= threshold))
    accepted = np.flatnonzero(~is_same & (scores > threshold))
    rejected = rejected[np.argsort(scores[rejected])][: count // 2]
    accepted = accepted[np.argsort(-scores[accepted])][: count // 2]
    return np.concatenate([accepted, rejected]), threshold


def unit_rows(features: np.ndarray) -> np.ndarray:
    """Normalize features [n, D] to unit length; zeros stay zeros."""
    return features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)


def embedding_map(features: np.ndarray, labels: list[str]) -> EmbeddingMap:
    """Project features [n, D] on their first two principal components."""
    centered = features - features.mean(axis=0)
    left, values, _ = np.linalg.svd(centered, full_matrices=False)
    explained = (values[:2] ** 2).sum() / max((values**2).sum(), 1e-12)
    return EmbeddingMap(left[:, :2] * values[:2], labels, float(explained))
