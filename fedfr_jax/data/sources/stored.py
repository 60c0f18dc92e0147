"""Names, sizes and checksums of a source's stored images."""

import functools
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from fedfr_jax.data.sources.decoding import in_threads
from fedfr_jax.data.sources.image_files import Files
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

    @functools.cache
    def sizes():
        return np.fromiter(map(size, range(len(names))), np.int64, len(names))

    @functools.cache  # a run compares its data at several places
    def checksums():
        is_read = sizes().sum() <= MAX_READ_BYTES

        def checksum(row):
            crc = zlib.crc32(read(row)) if is_read else 0
            return (
                crc if landmarks is None else zlib.crc32(landmarks[row].tobytes(), crc)
            )

        def checksums_of(rows):
            return [checksum(row) for row in rows]

        return np.array(in_threads(checksums_of, np.arange(len(names))), np.uint32)

    facts = lambda rows: (sizes()[rows], checksums()[rows])
    return StoredImages(names, facts, is_named)


def stored_files(
    files: Files, names: Sequence[str], *, landmarks: np.ndarray | None = None
) -> StoredImages:
    """Names, sizes and checksums of files of a directory or .zip."""
    size = lambda row: files.size(names[row])
    read = lambda row: files.read(names[row])
    return stored_images(names, size, read, landmarks=landmarks)


def stored_rows(
    read: Callable[[np.ndarray], np.ndarray], shape, count: int
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


def concat(parts: dict[str, Source]) -> StoredImages:
    """Concatenate the stored images of several sources, named <part>/<name>."""
    stored = {part: get_stored(source) for part, source in parts.items()}
    names = [f"{part}/{name}" for part, x in stored.items() for name in x.names]
    starts = np.cumsum([0, *(len(x.names) for x in stored.values())])

    def facts(rows):
        sizes, checksums = np.empty(len(rows), np.int64), np.empty(len(rows), np.uint32)
        part_index = np.searchsorted(starts, rows, side="right") - 1
        for i, part in enumerate(stored.values()):
            is_here = part_index == i
            sizes[is_here], checksums[is_here] = part.facts(rows[is_here] - starts[i])
        return sizes, checksums

    return StoredImages(names, facts, all(x.is_named for x in stored.values()))
