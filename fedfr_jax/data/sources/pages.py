"""Files that are mapped into memory, of which the system reads what is asked for."""

import mmap

import numpy as np

PIECE = 2**17  # bytes; of a longer request Linux reads what it would read ahead


def at_random(array: np.memmap) -> np.memmap:
    """The array, around whose pages nothing is read ahead: as much as several MiB."""
    array.base.madvise(mmap.MADV_RANDOM)
    return array


def expect(array: np.memmap, begin: int, end: int) -> None:
    """Start to read the array's bytes [begin, end) at once, and not page by page."""
    header = array.offset % mmap.ALLOCATIONGRANULARITY
    first, end = header + begin, header + end
    for start in range(first - first % mmap.PAGESIZE, end, PIECE):
        array.base.madvise(mmap.MADV_WILLNEED, start, min(PIECE, end - start))


def expect_rows(array: np.memmap, rows: np.ndarray) -> None:
    """`expect` of `rows` [n], neighbours in one request."""
    rows = np.unique(rows)
    for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1):
        expect(array, *(array.strides[0] * np.array([run[0], run[-1] + 1])).tolist())
