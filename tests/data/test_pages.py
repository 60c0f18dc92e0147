"""Of a mapped file only what is asked for is read, as the system's own list shows."""

import ctypes
import mmap
import os

import numpy as np
import pytest

from fedfr_jax.data.sources import pages

ROW, COUNT = mmap.PAGESIZE, 600


@pytest.fixture
def rows(tmp_path):
    """A file of a page for each row, none of them in memory."""
    path = tmp_path / "rows.npy"
    np.save(path, np.repeat(np.arange(COUNT, dtype=np.uint8), ROW).reshape(COUNT, ROW))
    mapped = np.load(path, mmap_mode="r")
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if in_memory(mapped).any():
        pytest.skip(f"{tmp_path} keeps its files in memory")
    return mapped


def in_memory(mapped):
    """Which pages of the mapped file the system holds: [P] bool."""
    size = len(mapped.base)
    held = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    place = mapped.ctypes.data - mapped.offset
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(place), ctypes.c_size_t(size), held) == 0
    return np.array(held) & 1 > 0


def test_what_lies_around_is_not_read(rows):
    rows = pages.at_random(rows)
    pages.expect_rows(rows, np.array([301, 7, 300, 302, 7]))
    np.testing.assert_array_equal(rows[[301, 7]].min(axis=1), [301 % 256, 7])
    np.testing.assert_array_equal(rows[[301, 7]].max(axis=1), [301 % 256, 7])
    # A row lies on two pages, as the file begins with a header.
    np.testing.assert_array_equal(
        np.flatnonzero(in_memory(rows)), [7, 8, *range(300, 304)]
    )


def test_the_last_row_ends_with_the_file(rows):
    pages.expect_rows(rows, np.array([COUNT - 1]))
    assert rows[-1, -1] == (COUNT - 1) % 256
