"""Selected rows of sources, concatenated sources, and duplicate checks of lists."""

import os
from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np

from fedfr_jax.data.sources import stored
from fedfr_jax.data.sources.decoding import check_rows
from fedfr_jax.ranges import Whole
from fedfr_jax.schema import checked
from fedfr_jax.types import Pairs, Source

Value = TypeVar("Value")
# Fields of `Source` that are arrays [T, ...].
BY_ROW = ("landmarks", "cameras", "is_test", "roles", "client_ids")


def check_unique(
    rows: Iterable[tuple[str, Value]], kind: str, path: str | os.PathLike
) -> dict[str, Value]:
    """Build {name: value} from rows (name, value); raise ValueError for a duplicate.

    Args:
      kind: of the names, in an error.
      path: the list's file.
    """
    values: dict[str, Value] = {}
    for name, value in rows:
        if name in values:
            raise ValueError(
                f"{path} must list each {kind} once, got {name} twice. Keep one of its "
                "rows."
            )
        values[name] = value
    return values


def keep_rows(source: Source, rows: np.ndarray) -> Source:
    """Source with only `rows` [n]; identities without images are dropped.

    Labels are renumbered in their order, and pairs that lose an image are dropped.
    """
    rows = check_rows(rows, len(source.labels))
    old_labels, labels = np.unique(source.labels[rows], return_inverse=True)
    pairs, masks = source.pairs, source.masks
    if pairs is not None:
        new_row = np.full(len(source.labels), -1, np.int32)
        new_row[rows] = np.arange(len(rows), dtype=np.int32)
        new_rows = new_row[pairs.indices]
        is_whole = (new_rows >= 0).all(axis=1)
        pairs = Pairs(new_rows[is_whole], pairs.is_same[is_whole])
    if masks is not None:
        read_masks = masks.read
        of_rows = lambda i: read_masks(rows[check_rows(i, len(rows))])
        masks = masks._replace(read=of_rows)
    arrays = source._asdict()
    return source._replace(
        read=lambda indices: source.read(rows[check_rows(indices, len(rows))]),
        labels=labels.astype(np.int32),
        names=tuple(source.names[label] for label in old_labels),
        pairs=pairs,
        masks=masks,
        stored=stored.select_rows(source.stored, rows),
        **{k: arrays[k][rows] for k in BY_ROW if arrays[k] is not None},
    )


@checked
def keep_identities(source: Source, min_images: Whole, origin: str) -> Source:
    """Source with only the identities that have at least `min_images` images."""
    counts = np.bincount(source.labels, minlength=len(source.names))
    is_kept = counts >= min_images
    if min_images <= 1 or is_kept.all():
        return source
    if is_kept.sum() < 2:
        raise ValueError(
            f"min_images must leave at least 2 identities in {origin}, got "
            f"{min_images}: {is_kept.sum()} of {len(counts)} identities remain, the "
            f"largest has {counts.max()} images."
        )
    return keep_rows(source, np.flatnonzero(is_kept[source.labels]))


def concat_sources(parts: Mapping[str, Source]) -> Source:
    """Concatenate sources; identities are named <part>/<name> and never merged.

    Identities in more than one part count as different ones. Pairs, masks and client
    ids are dropped; landmarks, test parts, cameras and roles stay when every source has
    them. Cameras keep their numbers: the camera 1 of two parts is two cameras.
    Preprocessing stays where it is the same for all.
    """
    shapes = {name: part.input_shape for name, part in parts.items()}
    if len(set(shapes.values())) != 1:
        raise ValueError(f"sources must have images of one shape, got {shapes}.")
    sources = list(parts.values())
    starts = np.cumsum([0, *(len(source.labels) for source in sources)])
    first = np.cumsum([0, *(len(source.names) for source in sources)])
    shape = sources[0].input_shape

    def read(indices):
        rows = check_rows(indices, int(starts[-1]))
        images = np.empty((len(rows), *shape), np.uint8)
        owner = np.searchsorted(starts, rows, side="right") - 1
        for i, source in enumerate(sources):
            is_here = owner == i
            if is_here.any():
                images[is_here] = source.read(rows[is_here] - starts[i])
        return images

    def concat_optional(key):
        """Concatenate the arrays of all sources; None if one has none."""
        arrays = [source._asdict()[key] for source in sources]
        return None if any(x is None for x in arrays) else np.concatenate(arrays)

    labels = [x.labels + n for x, n in zip(sources, first[:-1], strict=True)]
    preprocessings = {source.preprocessing for source in sources}
    return Source(
        read=read,
        labels=np.concatenate(labels).astype(np.int32),
        names=tuple(f"{part}/{name}" for part, x in parts.items() for name in x.names),
        input_shape=shape,
        passed_over="\n".join(x.passed_over for x in sources if x.passed_over),
        preprocessing=preprocessings.pop() if len(preprocessings) == 1 else None,
        stored=stored.concat(parts),
        **{key: concat_optional(key) for key in BY_ROW if key != "client_ids"},
    )


def names_from(names: tuple[str, ...], part: str, key: str) -> np.ndarray:
    """Mask [M] of the identities whose name starts with `part`/."""
    parts = np.array([name.partition("/")[0] for name in names])
    if part not in parts:
        known = sorted(set(parts.tolist()))
        listing = ", ".join(known[:5]) + (", ..." if len(known) > 5 else "")
        raise ValueError(
            f"{key} must be one of the concatenated sources ({listing}), got {part}."
        )
    return parts == part
