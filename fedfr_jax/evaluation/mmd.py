"""Maximum mean discrepancy between two models' features.

Gretton et al. 2012, "A Kernel Two-Sample Test" (JMLR 13), equations 3 (unbiased) and 5
(biased).
"""

from typing import Literal

import numpy as np

from fedfr_jax.schema import checked


@checked
def mmd_squared(
    x: np.ndarray,
    y: np.ndarray,
    *,
    kernel: Literal["rbf", "linear"] = "rbf",
    unbiased: bool = False,
    sigma: float | None = None,
) -> float:
    """Squared MMD of two samples; the biased estimate is at least 0.

    Args:
      x, y: [n, D], [m, D]; at least two rows each when unbiased.
      kernel: rbf, exp(-||x - y||^2 / (2 sigma^2)), or linear, x y.
      sigma: of the rbf kernel; None is the median distance of the pooled rows.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    within = _gram(np.concatenate([x, y]), kernel, sigma)
    n = len(x)
    xx, yy, xy = within[:n, :n], within[n:, n:], within[:n, n:]
    return float(_mean(xx, unbiased) + _mean(yy, unbiased) - 2 * xy.mean())


def median_distance(rows: np.ndarray) -> float:
    """Median Euclidean distance between two rows of [n, D]."""
    return float(np.sqrt(np.median(_squared(rows)[np.triu_indices(len(rows), 1)])))


def _gram(rows, kernel, sigma):
    if kernel == "linear":
        return rows @ rows.T
    sigma = median_distance(rows) if sigma is None else sigma
    if not sigma > 0:
        raise ValueError(f"sigma must be positive, got {sigma}.")
    return np.exp(-_squared(rows) / (2 * sigma**2))


def _squared(rows):
    lengths = (rows**2).sum(1)
    return np.maximum(lengths[:, None] + lengths[None] - 2 * rows @ rows.T, 0)


def _mean(gram, unbiased):
    if not unbiased:
        return gram.mean()
    return (gram.sum() - np.trace(gram)) / (len(gram) * (len(gram) - 1))
