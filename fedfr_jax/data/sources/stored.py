"""Names, sizes and checksums of a source's stored images."""

import functools
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from fedfr_jax.data.sources.decoding import in_threads
from fedfr_jax.data.sources.image_files import Files
from fedfr_jax.types import Source, StoredImages

MAX_READ_BYTES = 2**28  # of a larger set, sizes stand for the contents


def stored_images(
    names: Sequence[str],
    size: Callable[[int], int],
    read: Callable[[int], bytes],
    *,
    beside: np.ndarray | None = None,
    is_named: bool = True,
) -> StoredImages:
    """Names of images [T], with sizes and checksums computed when asked for.

    Args:
      size: row -> bytes of the stored image.
      read: row -> these bytes.
      beside: [T, ...] what else decides how an image is read, such as landmarks.
      is_named: False where `names` are numbers of rows.
    """

    @functools.cache
    def sizes():
        return np.fromiter(map(size, range(len(names))), np.int64, len(names))

    @functools.cache  # a run compares its data at several places
    def checksums():
        is_read = sizes().sum() <= MAX_READ_BYTES

        def checksum(row):
            found = zlib.crc32(read(row)) if is_read else 0
            return found if beside is None else zlib.crc32(beside[row].tobytes(), found)

        part = lambda rows: [*map(checksum, rows)]
        return np.array(in_threads(part, np.arange(len(names))), np.uint32)

    facts = lambda rows: (sizes()[rows], checksums()[rows])
    return StoredImages(names, facts, is_named)


def stored_files(
    files: Files, names: Sequence[str], *, beside: np.ndarray | None = None
) -> StoredImages:
    """Names, sizes and checksums of files of a directory or .zip."""
    size = lambda row: files.size(names[row])
    read = lambda row: files.read(names[row])
    return stored_images(names, size, read, beside=beside)


def stored_rows(
    read: Callable[[np.ndarray], np.ndarray], shape, count: int
) -> StoredImages:
    """Sizes and checksums of decoded images without names, read by `Source.read`."""
    size = int(np.prod(shape))
    one = lambda row: read(np.array([row])).tobytes()
    return stored_images(row_names(count), lambda row: size, one, is_named=False)


def of_rows(source: Source) -> StoredImages:
    """A source's stored images; if unknown, rows as names and no checksums."""
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
    return stored._replace(names=names, facts=lambda own: stored.facts(rows[own]))


def concat(parts: dict[str, Source]) -> StoredImages:
    """Concatenate the stored images of several sources, named <part>/<name>."""
    found = [of_rows(source) for source in parts.values()]
    counts = [len(one.names) for one in found]
    ends = np.cumsum(counts)

    def facts(rows):
        sizes, checksums = np.empty(len(rows), np.int64), np.empty(len(rows), np.uint32)
        owner = np.searchsorted(ends, rows, side="right")
        for i, one in enumerate(found):
            here = owner == i
            own = rows[here] - (ends[i] - counts[i])
            sizes[here], checksums[here] = one.facts(own)
        return sizes, checksums

    names = [
        f"{part}/{name}"
        for part, one in zip(parts, found, strict=True)
        for name in one.names
    ]
    return StoredImages(names, facts, all(one.is_named for one in found))
