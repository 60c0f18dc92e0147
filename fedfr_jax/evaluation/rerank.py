"""Re-ranking by k-reciprocal neighbors.

Zhong et al., "Re-ranking Person Re-identification with k-reciprocal Encoding", CVPR
2017, arXiv:1701.08398, as re_ranking_ranklist of its code computes it
(github.com/zhunzhong07/person-re-ranking): distances are squared, each image's divided
by its largest, and the second expansion averages over the k2 nearest images, the image
itself among them.

Deviation: neighbors and encodings are sparse and distances are computed in chunks, so
that memory grows with the number of images and not with its square.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import sparse

from fedfr_jax.evaluation.retrieval import Scores
from fedfr_jax.evaluation.score_tiles import check_features, to_float64

CHUNK_SIZE = 1 << 22  # numbers in memory at once


class Neighbors(NamedTuple):
    """The k nearest of n images, each image itself first."""

    indices: np.ndarray  # [n, k + 1] int32, ascending distance
    max_distances: np.ndarray  # [n] squared distance of the farthest image


def k_reciprocal_rerank(
    queries, gallery, *, k1: int = 20, k2: int = 6, weight: float = 0.3
) -> Scores:
    """Re-ranking scores -(weight * D + (1 - weight) * Jaccard distance) of all pairs.

    Args:
      queries, gallery: features [Q, D] and [G, D], taken as they are: of unit length
        for cosines.
      k1: number of neighbors that are tested for reciprocity; fewer than Q + G.
      k2: number of nearest images over which an encoding is averaged, with the image
        itself; 1 for no average.
      weight: of the distance D itself, in [0, 1].
    """
    num_queries, num_images = len(queries), len(queries) + len(gallery)
    check_reranking(num_images, k1=k1, k2=k2, weight=weight)
    images = jnp.concatenate([jnp.asarray(queries), jnp.asarray(gallery)])
    check_features("queries and gallery", images, np.zeros(num_images))
    images = to_float64(images)
    neighbors = nearest(images, k1)
    encoding = encode(images, neighbors, k1)
    encoding = average_neighbors(encoding, neighbors.indices[:, :k2])
    gallery_encoding = encoding[num_queries:].tocsc()

    def scores(rows):
        x, y = images[jnp.asarray(rows)], images[num_queries:]
        distance = np.asarray(_distances(x, y)) / neighbors.max_distances[rows][:, None]
        overlap = np.stack([_overlap(encoding[[i]], gallery_encoding) for i in rows])
        jaccard = 1 - overlap / (2 - overlap)
        return jnp.asarray(-((1 - weight) * jaccard + weight * distance), x.dtype)

    return scores


def check_reranking(
    num_images: int, *, k1: int = 20, k2: int = 6, weight: float = 0.3
) -> None:
    """Raise ValueError for settings that do not fit n images."""
    if not 1 <= k2 <= k1 + 1 <= num_images or not 0 <= weight <= 1:
        raise ValueError(
            f"re-ranking must have 1 <= k2 <= k1 + 1 <= {num_images} (the images) and "
            f"a weight in [0, 1], got k1 = {k1}, k2 = {k2}, weight = {weight}."
        )


@jax.jit
def _distances(x, y):
    """Squared distances [B, n] of x [B, D] and y [n, D], at least 0."""
    product = jnp.dot(x, y.T, precision=jax.lax.Precision.HIGHEST)
    norms = jnp.sum(x * x, axis=1)[:, None] + jnp.sum(y * y, axis=1)[None, :]
    return jnp.maximum(norms - 2 * product, 0)


def nearest(images: jax.Array, k: int) -> Neighbors:
    """Find the k nearest of images [n, D], after the image itself."""
    size = min(max(1, CHUNK_SIZE // len(images)), len(images))
    near = np.empty((len(images), k + 1), np.int32)
    largest = np.empty(len(images), images.dtype)
    for start in range(0, len(images), size):
        start = min(start, len(images) - size)
        chunk = _nearest(images, jnp.int32(start), size=size, k=k)
        near[start : start + size], largest[start : start + size] = chunk
    return Neighbors(near, np.where(largest > 0, largest, 1))


@functools.partial(jax.jit, static_argnames=("size", "k"))
def _nearest(images, start, *, size, k):
    """Nearest images [size, k + 1] and largest distance [size] of a chunk."""
    distance = _distances(jax.lax.dynamic_slice_in_dim(images, start, size), images)
    row = start + jnp.arange(size, dtype=jnp.int32)
    is_self = row[:, None] == jnp.arange(len(images), dtype=jnp.int32)[None, :]
    near = jax.lax.top_k(jnp.where(is_self, jnp.inf, -distance), k + 1)[1]
    return near, jnp.max(distance, axis=1)


def encode(images: jax.Array, neighbors: Neighbors, k1: int) -> sparse.csr_array:
    """Encode each image by exp(-D) over its reciprocal neighbors, with sum 1."""
    row, column = expand(neighbors.indices, k1)
    distance = np.empty(len(row), images.dtype)
    size = max(1, CHUNK_SIZE // images.shape[1])
    for start in range(0, len(row), size):
        part = slice(start, start + size)
        x, y = images[jnp.asarray(row[part])], images[jnp.asarray(column[part])]
        distance[part] = jnp.sum((x - y) ** 2, axis=1)
    values = np.exp(-distance / neighbors.max_distances[row])
    values /= np.bincount(row, values)[row].astype(values.dtype)
    shape = len(images), len(images)
    return sparse.csr_array((values, (row, column)), shape=shape)


def expand(near: np.ndarray, k1: int) -> tuple[np.ndarray, np.ndarray]:
    """Expand reciprocal neighbors: (image, neighbor) of all sets R*, sorted, [nnz].

    R*(i) is R(i, k1) with each R(c, k1 / 2), c in R(i, k1), of which more than two
    thirds are in R(i, k1); R(i, k) are those of the k nearest of i that have i among
    their k nearest.
    """
    num_images = len(near)
    whole = _reciprocal(near)
    half = near[:, : round(k1 / 2) + 1]
    is_half = _reciprocal(half)
    pairs = [np.nonzero(whole)[0] * num_images + near[whole]]
    size = max(1, CHUNK_SIZE // (near.shape[1] ** 2 * half.shape[1]))
    for start in range(0, num_images, size):
        first, is_first = near[start : start + size], whole[start : start + size]
        second, is_second = half[first], is_half[first]  # [b, k1 + 1, h + 1]
        first_set = np.where(is_first, first, -1)[:, None, None, :]
        is_shared = is_second & (second[..., None] == first_set).any(axis=-1)
        share = is_shared.sum(axis=-1) * 3 > is_second.sum(axis=-1) * 2
        is_added = (is_first & share)[..., None] & is_second
        image = start + np.nonzero(is_added)[0]
        pairs.append(image * num_images + second[is_added])
    return np.divmod(np.unique(np.concatenate(pairs)), num_images)


def _reciprocal(near: np.ndarray) -> np.ndarray:
    """Mask of near [n, k + 1]: neighbors that have the image as theirs."""
    image = np.arange(len(near))[:, None]
    columns = [(near[near[:, i]] == image).any(axis=1) for i in range(near.shape[1])]
    return np.stack(columns, axis=1)


def average_neighbors(encoding: sparse.csr_array, near: np.ndarray) -> sparse.csr_array:
    """Average for each image the encodings of its k2 nearest images, near [n, k2]."""
    num_images, k2 = near.shape
    weights = np.full(near.size, 1 / k2, encoding.dtype)
    starts = k2 * np.arange(num_images + 1)
    nearest_k2 = sparse.csr_array((weights, near.reshape(-1), starts), encoding.shape)
    return nearest_k2 @ encoding


def _overlap(query: sparse.csr_array, gallery: sparse.csc_array) -> np.ndarray:
    """Sum [G] of elementwise minima of the encodings of a query [1, n] and [G, n]."""
    shared = gallery[:, query.indices]
    of_query = np.repeat(query.data, np.diff(shared.indptr))
    return np.bincount(
        shared.indices, np.minimum(shared.data, of_query), shared.shape[0]
    )
