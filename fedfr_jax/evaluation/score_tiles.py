"""Score matrices in tiles: pairs within one set, and probes against a gallery.

A tile is a matrix product on the device with a kind for every entry. The whole matrix
is never in memory.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NEGATIVE, POSITIVE, IGNORED = 0, 1, 2
ALL, OTHERS = "all", "other_clients"  # which pairs of two identities count
TILE_SIZE = (1024, 8192)  # rows and columns: 32 MiB of float32 scores


class ScoreTile(NamedTuple):
    """A tile of a score matrix, with the kind of each entry."""

    scores: jax.Array  # [R, C]
    kinds: jax.Array  # [R, C] int8: NEGATIVE, POSITIVE or IGNORED


# Each call streams the same tiles, with the same bits.
ScoreTiles = Callable[[], Iterator[ScoreTile]]


def check_features(name: str, features, labels) -> None:
    """Raise ValueError unless features [Q, D] of labels [Q] are finite, with Q > 0."""
    assert np.ndim(features) == 2 and np.shape(labels) == np.shape(features)[:1]
    if not len(features):
        raise ValueError(f"{name} must have at least one feature, got 0.")
    if not np.isfinite(np.asarray(features)).all():
        raise ValueError(f"{name} must be finite, got nan or inf.")


def to_float64(features: jax.Array) -> jax.Array:
    """Cast features to float32, unless they are float64."""
    return features.astype(
        jnp.float64 if features.dtype == jnp.float64 else jnp.float32
    )


@jax.jit
def unit_length(features: jax.Array) -> jax.Array:
    """L2-normalize features [..., D], in float32 or float64.

    A zero row stays zero. Rows are first scaled by a power of two, which is exact, so
    that squares neither overflow nor vanish.
    """
    x = to_float64(features)
    _, exponent = jnp.frexp(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    x = jnp.ldexp(x, -exponent)
    norm = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    return x / jnp.where(norm > 0, norm, 1)


def _codes(*labels) -> list[np.ndarray]:
    """Integer codes (int32), equal for equal labels of any integer or string type."""
    lengths = np.cumsum([len(part) for part in labels])[:-1]
    all_labels = np.concatenate([np.asarray(part) for part in labels])
    codes = np.unique(all_labels, return_inverse=True)[1].astype(np.int32)
    return np.split(codes, lengths)


def _dot(rows, columns):
    """Scores [R, C] of rows [R, D] and columns [C, D], in highest precision."""
    return jnp.dot(rows, columns.T, precision=jax.lax.Precision.HIGHEST)


def _window(start, size, length):
    """Indices [size] of a window that ends within `length`; a mask of those >= start.

    The last window of an array slides back instead of running over the end.
    """
    positions = jnp.minimum(start, length - size) + jnp.arange(size, dtype=jnp.int32)
    return positions, positions >= start


def _kinds(is_mated, is_valid):
    kinds = jnp.where(is_mated, POSITIVE, NEGATIVE)
    return jnp.where(is_valid, kinds, IGNORED).astype(jnp.int8)


@functools.partial(jax.jit, static_argnames=("num_columns", "negatives"))
def _pair_tile(
    features, labels, is_row, rows, start, *, num_columns, negatives=ALL
) -> ScoreTile:
    """Tile of rows [R] (-1 is padding) against the window of columns at `start`."""
    columns, is_new = _window(start, num_columns, features.shape[0])
    x = jnp.take(features, rows, axis=0, mode="clip")
    y = jax.lax.dynamic_slice_in_dim(features, columns[0], num_columns)
    is_mated = jnp.take(labels, rows, mode="clip")[:, None] == labels[columns][None, :]
    # A pair of two rows is in two tiles; that with the later column counts.
    is_once = ~is_row[columns][None, :] | (columns[None, :] > rows[:, None])
    is_valid = (rows >= 0)[:, None] & is_new[None, :] & is_once
    if negatives == OTHERS:
        is_valid &= is_mated | ~is_row[columns][None, :]
    return ScoreTile(_dot(x, y), _kinds(is_mated, is_valid))


def pair_tiles(
    features,
    labels,
    is_row,
    *,
    tile_size: tuple[int, int] = TILE_SIZE,
    negatives: str = ALL,
) -> ScoreTiles:
    """Cosines of all unordered pairs with at least one row of `is_row`, each pair once.

    Args:
      features: [Q, D], normalized here.
      labels: [Q] identities; a pair of equal labels is positive.
      is_row: [Q] bool; all True gives every pair of the set.
      tile_size: largest (rows, columns) of a tile.
      negatives: ALL, or OTHERS: a pair of two identities counts only if one of its
        images is not in `is_row`.

    Returns:
      A function that streams the tiles.
    """
    check_features("features", features, labels)
    is_row = np.asarray(is_row, bool)
    rows = np.flatnonzero(is_row).astype(np.int32)
    num_rows, num_columns = min(tile_size[0], len(rows)), min(tile_size[1], len(labels))
    rows = np.pad(rows, (0, -len(rows) % num_rows), constant_values=-1)
    tables = jax.device_put((unit_length(features), *_codes(labels), is_row))

    def stream():
        for part in rows.reshape(-1, num_rows):
            for start in range(0, len(is_row), num_columns):
                stop = min(start + num_columns, len(is_row))
                if stop <= part[0] + 1 and is_row[start:stop].all():
                    continue  # these pairs were in earlier tiles, as columns
                yield _pair_tile(
                    *tables,
                    part,
                    np.int32(start),
                    num_columns=num_columns,
                    negatives=negatives,
                )

    return stream


@functools.partial(jax.jit, static_argnames=("size", "is_same_set"))
def _gallery_tile(
    queries, labels, gallery, gallery_labels, starts, *, size, is_same_set
) -> ScoreTile:
    """Tile of the queries and gallery entries whose windows begin at starts [2]."""
    rows, is_new_row = _window(starts[0], size[0], queries.shape[0])
    columns, is_new_column = _window(starts[1], size[1], gallery.shape[0])
    x = jax.lax.dynamic_slice_in_dim(queries, rows[0], size[0])
    y = jax.lax.dynamic_slice_in_dim(gallery, columns[0], size[1])
    is_mated = labels[rows][:, None] == gallery_labels[columns][None, :]
    is_valid = is_new_row[:, None] & is_new_column[None, :]
    if is_same_set:
        is_valid &= rows[:, None] != columns[None, :]
    return ScoreTile(_dot(x, y), _kinds(is_mated, is_valid))


def gallery_tiles(
    queries,
    labels,
    gallery,
    gallery_labels,
    *,
    tile_size: tuple[int, int] = TILE_SIZE,
    is_same_set: bool = False,
) -> ScoreTiles:
    """Inner products of normalized queries [Q, D] with gallery entries [G, D].

    The gallery is taken as it is, because some protocols keep its norm.

    Args:
      is_same_set: whether the i-th query and the i-th entry are one image, which is
        then not compared with itself.
    """
    check_features("queries", queries, labels)
    check_features("gallery", gallery, gallery_labels)
    lengths = len(labels), len(gallery_labels)
    size = min(tile_size[0], lengths[0]), min(tile_size[1], lengths[1])
    queries = unit_length(queries)
    labels, gallery_labels = _codes(labels, gallery_labels)
    gallery = gallery.astype(queries.dtype)
    tables = jax.device_put((queries, labels, gallery, gallery_labels))

    def stream():
        for row in range(0, lengths[0], size[0]):
            for column in range(0, lengths[1], size[1]):
                starts = np.array([row, column], np.int32)
                yield _gallery_tile(*tables, starts, size=size, is_same_set=is_same_set)

    return stream
