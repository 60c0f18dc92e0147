"""Names, sizes and checksums of a source's stored images."""

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedfr_jax.data.sources.decoding import in_threads
from fedfr_jax.types import Source, StoredImages

MAX_READ_BYTES = 2**28  # of a set; images of a larger one have no checksums


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

    facts_of = lambda rows: tuple(values[rows] for values in facts())
    return StoredImages(names, facts_of, is_named)


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


def select_rows(stored: StoredImages | None, rows: np.ndarray) -> StoredImages | None:
    """Stored images of `rows` [n], with their names."""
    if stored is None:
        return None
    names = [stored.names[row] for row in rows]
    facts = lambda selected: stored.facts(rows[selected])
    return stored._replace(names=names, facts=facts)


def concat(parts: Mapping[str, Source]) -> StoredImages:
    """Concatenate the stored images of several sources, named <part>/<name>."""
    stored = {part: get_stored(source) for part, source in parts.items()}
    names = [f"{part}/{name}" for part, x in stored.items() for name in x.names]

    def facts(rows):
        every = [x.facts(np.arange(len(x.names))) for x in stored.values()]
        return tuple(np.concatenate(one)[rows] for one in zip(*every, strict=True))

    return StoredImages(names, facts, all(x.is_named for x in stored.values()))
