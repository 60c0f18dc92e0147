"""Parts of a source: chosen rows, and only the identities with enough images."""

import numpy as np

from fedfr_jax.data.sources.images import check_rows
from fedfr_jax.data.sources.stored import chosen
from fedfr_jax.schema import check_whole
from fedfr_jax.types import Pairs, Source


def keep_rows(source: Source, rows: np.ndarray) -> Source:
    """The source with only `rows` [n]; identities left without images are dropped.

    Labels are numbered anew in their old order, and pairs that lose an image go.
    """
    rows = check_rows(rows, len(source.labels))
    kept, labels = np.unique(source.labels[rows], return_inverse=True)
    pairs = source.pairs
    if pairs is not None:
        place = np.full(len(source.labels), -1, np.int32)
        place[rows] = np.arange(len(rows), dtype=np.int32)
        moved = place[pairs.indices]
        is_whole = (moved >= 0).all(axis=1)
        pairs = Pairs(moved[is_whole], pairs.is_same[is_whole])
    masks = source.masks
    if masks is not None:
        read = masks.read
        masks = masks._replace(read=lambda i: read(rows[check_rows(i, len(rows))]))
    return source._replace(
        read=lambda indices: source.read(rows[check_rows(indices, len(rows))]),
        labels=labels.astype(np.int32),
        names=tuple(source.names[label] for label in kept),
        landmarks=_at(source.landmarks, rows),
        cameras=_at(source.cameras, rows),
        pairs=pairs,
        is_test=_at(source.is_test, rows),
        owners=_at(source.owners, rows),
        masks=masks,
        roles=_at(source.roles, rows),
        stored=chosen(source.stored, rows),
    )


def keep_identities(source: Source, min_images: int, origin: str) -> Source:
    """The source with only the identities that have at least `min_images` images.

    Raises:
      ValueError: naming `origin` when fewer than two identities remain.
    """
    check_whole("min_images", min_images, 0)
    counts = np.bincount(source.labels, minlength=len(source.names))
    is_kept = counts >= min_images
    if min_images <= 1 or is_kept.all():
        return source
    if is_kept.sum() < 2:
        raise ValueError(
            f"min_images must leave at least 2 identities of {origin}, got "
            f"{min_images}: {is_kept.sum()} of {len(counts)} identities remain, the "
            f"largest has {counts.max()} images."
        )
    return keep_rows(source, np.flatnonzero(is_kept[source.labels]))


def _at(values: np.ndarray | None, rows: np.ndarray) -> np.ndarray | None:
    return None if values is None else values[rows]
