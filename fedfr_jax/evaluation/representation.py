"""How far features of two networks are apart, and how spread one network's are.

MMD: maximum mean discrepancy, Gretton et al. 2012, "A Kernel Two-Sample Test" (JMLR
13), equations 3 (unbiased) and 5 (biased). Entropies as FedMargin draws them (Michieli,
Toldo, Ozay 2022, IEEE Internet of Things Journal), in nats.
"""

import jax
import jax.numpy as jnp
import numpy as np

KERNELS = ("rbf", "linear")
TINY = 1e-12


def mmd_squared(
    x: np.ndarray,
    y: np.ndarray,
    *,
    kernel: str = "rbf",
    unbiased: bool = False,
    sigma: float | None = None,
) -> float:
    """MMD^2 of two samples; the biased one is at least 0.

    Args:
      x, y: [n, D], [m, D]; at least two rows each when unbiased.
      kernel: rbf, exp(-||x - y||^2 / (2 sigma^2)), or linear, x y.
      sigma: of the rbf kernel; None is the median distance of the pooled rows.

    Raises:
      ValueError: for an unknown kernel, samples that do not fit or a sigma of 0.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    least = 2 if unbiased else 1
    if x.ndim != 2 or x.shape[1:] != y.shape[1:] or min(len(x), len(y)) < least:
        raise ValueError(
            f"samples must be [n, D] with n of at least {least}, got {x.shape} and "
            f"{y.shape}."
        )
    within = _gram(np.concatenate([x, y]), kernel, sigma)
    n = len(x)
    xx, yy, xy = within[:n, :n], within[n:, n:], within[:n, n:]
    return float(_mean(xx, unbiased) + _mean(yy, unbiased) - 2 * xy.mean())


def median_distance(rows: np.ndarray) -> float:
    """Median Euclidean distance of two rows of [n, D]."""
    return float(np.sqrt(np.median(_squared(rows)[np.triu_indices(len(rows), 1)])))


def _gram(rows, kernel, sigma):
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {KERNELS}, got {kernel!r}.")
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


def softmax_entropy(logits: jax.Array) -> jax.Array:
    """Entropy [...] of the class probabilities of logits [..., M], in [0, ln M]."""
    log = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log) * log, axis=-1)


def feature_entropy(features: jax.Array) -> jax.Array:
    """Entropy [...] over channels of features [..., D], in [0, ln D].

    Negative features count as 0, the others are divided by their sum; many active
    channels make it high.
    """
    features = jnp.maximum(features, 0)
    share = features / (features.sum(-1, keepdims=True) + TINY)
    return jax.scipy.special.entr(share).sum(-1)


def enlarged(maps: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Maps [B, h, w] at (H, W) pixels, bilinear between the centres of pixels."""
    return jax.image.resize(maps, (len(maps), *size), "bilinear")
