"""Selected rows of sources, concatenated sources, and what their images were made of.

The names, sizes and checksums of stored images tell whether a run's data has changed.
"""

import functools
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from fedfr_jax.data.sources.decoding import check_rows, in_threads
from fedfr_jax.ranges import Whole
from fedfr_jax.schema import checked
from fedfr_jax.types import Pairs, Source, StoredImages

Value = TypeVar("Value")
# Fields of `Source` that are arrays [T, ...].
BY_ROW = ("landmarks", "cameras", "is_test", "roles", "client_ids")
MAX_READ_BYTES = 2**28  # of a set; images of a larger one have no checksums


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
    pairs, masks, read = source.pairs, source.masks, source.read
    if pairs is not None:
        new_row = np.full(len(source.labels), -1, np.int32)
        new_row[rows] = np.arange(len(rows), dtype=np.int32)
        new_rows = new_row[pairs.indices]
        is_whole = (new_rows >= 0).all(axis=1)
        pairs = Pairs(new_rows[is_whole], pairs.is_same[is_whole])
    if masks is not None:
        masks = masks._replace(read=_of_rows(masks.read, rows))
    arrays = source._asdict()
    return source._replace(
        read=_of_rows(read, rows),
        labels=labels.astype(np.int32),
        names=tuple(source.names[label] for label in old_labels),
        pairs=pairs,
        masks=masks,
        stored=select_stored(source.stored, rows),
        **{k: arrays[k][rows] for k in BY_ROW if arrays[k] is not None},
    )


def _of_rows(read, rows: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """A `read` whose row i is row rows[i] of another."""
    return lambda indices: read(rows[check_rows(indices, len(rows))])


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
    shapes = {name: array_shape(part) for name, part in parts.items()}
    if len(set(shapes.values())) != 1:
        raise ValueError(f"sources must have images of one shape, got {shapes}.")
    sources = list(parts.values())
    (shape,) = {*shapes.values()}
    starts = np.cumsum([0, *(len(source.labels) for source in sources)])
    first = np.cumsum([0, *(len(source.names) for source in sources)])

    def read(indices):
        rows = check_rows(indices, int(starts[-1]))
        images = np.empty((len(rows), *shape), np.uint8)
        owner = np.searchsorted(starts, rows, side="right") - 1
        for i in np.unique(owner):
            images[owner == i] = sources[i].read(rows[owner == i] - starts[i])
        return images

    by_row = {key: [x._asdict()[key] for x in sources] for key in BY_ROW}
    del by_row["client_ids"]
    labels = [x.labels + n for x, n in zip(sources, first[:-1], strict=True)]
    preprocessings = {source.preprocessing for source in sources}
    return Source(
        read=read,
        labels=np.concatenate(labels).astype(np.int32),
        names=tuple(f"{part}/{name}" for part, x in parts.items() for name in x.names),
        input_shape=shape,
        passed_over="\n".join(x.passed_over for x in sources if x.passed_over),
        preprocessing=preprocessings.pop() if len(preprocessings) == 1 else None,
        stored=_concat_stored(parts),
    )._replace(
        **{
            key: np.concatenate(arrays)
            for key, arrays in by_row.items()
            if all(x is not None for x in arrays)
        }
    )


def array_shape(source: Source) -> tuple[int, ...]:
    """Shape of an example, which must be a single array."""
    if isinstance(source.input_shape, Mapping):
        raise ValueError(
            "a source that is packed or concatenated must have one array per example, "
            f"got {sorted(source.input_shape)}."
        )
    return source.input_shape


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


def stored_images(
    names: Sequence[str],
    size: Callable[[int], int],
    read: Callable[[int], bytes],
    *,
    landmarks: np.ndarray | None = None,
    is_named: bool = True,
) -> StoredImages:
    """Names of images [T], with sizes and checksums that are computed when needed.

    Args:
      size: row -> bytes of the stored image.
      read: row -> these bytes.
      landmarks: [T, 5, 2] of the stored images, part of their checksums.
      is_named: False where `names` are numbers of rows.
    """

    @functools.cache  # a run compares its data at several places
    def facts():
        sizes = np.array([size(row) for row in range(len(names))], np.int64)
        is_read = sizes.sum() <= MAX_READ_BYTES

        def checksum(row):
            crc = zlib.crc32(read(row)) if is_read else 0
            if landmarks is None:
                return crc
            return zlib.crc32(landmarks[row].tobytes(), crc)

        return sizes, np.array(in_threads(checksum, len(names)), np.uint32)

    return StoredImages(names, lambda rows: _take(facts(), rows), is_named)


def stored_rows(
    read: Callable[[np.ndarray], np.ndarray], shape: Sequence[int], count: int
) -> StoredImages:
    """Sizes and checksums of decoded images without names, read by `Source.read`."""
    size = lambda row: int(np.prod(shape))
    read_bytes = lambda row: read(np.array([row])).tobytes()
    return stored_images(row_names(count), size, read_bytes, is_named=False)


def get_stored(source: Source) -> StoredImages:
    """A source's stored images; if unknown, numbered ones of size and checksum 0."""
    if source.stored is not None:
        return source.stored
    unknown = lambda rows: (np.zeros(len(rows), np.int64), np.zeros(len(rows), "u4"))
    return StoredImages(row_names(len(source.labels)), unknown, is_named=False)


def row_names(count: int) -> list[str]:
    """Names for images that have none."""
    return [f"image {row}" for row in range(count)]


def select_stored(stored: StoredImages | None, rows: np.ndarray) -> StoredImages | None:
    """Stored images of `rows` [n], with their names."""
    if stored is None:
        return None
    names = [stored.names[row] for row in rows]
    return stored._replace(names=names, facts=lambda at: stored.facts(rows[at]))


def _concat_stored(parts: Mapping[str, Source]) -> StoredImages:
    """Concatenate the stored images of several sources, named <part>/<name>."""
    stored = {part: get_stored(source) for part, source in parts.items()}
    names = [f"{part}/{name}" for part, x in stored.items() for name in x.names]

    def facts(rows):
        sizes, checksums = zip(
            *(x.facts(np.arange(len(x.names))) for x in stored.values()), strict=True
        )
        return _take((np.concatenate(sizes), np.concatenate(checksums)), rows)

    return StoredImages(names, facts, all(x.is_named for x in stored.values()))


def _take(facts: tuple[np.ndarray, np.ndarray], rows: np.ndarray):
    """(sizes, checksums) of `rows` [n]."""
    sizes, checksums = facts
    return sizes[rows], checksums[rows]
