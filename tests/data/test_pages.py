"""Of a mapped file only what is asked for is read, as the system's own list shows."""

import ctypes
import mmap
import os

import numpy as np
import pytest

from fedfr_jax import files
from fedfr_jax.data.sources.packed import pack, packed
from fedfr_jax.data.sources.recordio import recordio
from fedfr_jax.types import Source
from tests.data.files import png
from tests.data.recordio_files import write_face_set

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
    rows = files.advise_random_access(rows)
    files.will_need_rows(rows, np.array([301, 7, 300, 302, 7]))
    np.testing.assert_array_equal(rows[[301, 7]].min(axis=1), [301 % 256, 7])
    np.testing.assert_array_equal(rows[[301, 7]].max(axis=1), [301 % 256, 7])
    # A row lies on two pages, as the file begins with a header.
    np.testing.assert_array_equal(
        np.flatnonzero(in_memory(rows)), [7, 8, *range(300, 304)]
    )


def test_the_last_row_ends_with_the_file(rows):
    files.will_need_rows(rows, np.array([COUNT - 1]))
    assert rows[-1, -1] == (COUNT - 1) % 256


@pytest.fixture
def asked(monkeypatch):
    """[(begin, end)] of what sources ask for."""
    ranges = []
    monkeypatch.setattr(files, "will_need", lambda file, *bytes: ranges.append(bytes))
    return ranges


def pictures(count):
    return np.random.default_rng(0).integers(256, size=(count, 8, 8, 1), dtype=np.uint8)


def test_packed_shards_are_asked_for_the_rows_that_are_read(tmp_path, asked):
    images, labels = pictures(6), np.arange(6, dtype=np.int32)
    whole = Source(images.__getitem__, labels, tuple("abcdef"), (8, 8, 1))
    pack(whole, tmp_path, max_file_bytes=4 * 64)
    packed(tmp_path).read(np.array([5, 1, 2, 4, 1]))
    assert asked == [(64, 3 * 64), (0, 2 * 64)]  # of the first shard and the second


def test_records_are_asked_for_one_by_one_to_their_ends(tmp_path, asked):
    path, payloads = tmp_path / "train.rec", [png(x[..., 0]) for x in pictures(3)]
    write_face_set(path, payloads, [0, 1, 2], image_size=(8, 8))
    source = recordio(path, channels=1)
    asked.clear()
    for row in (2, 0):
        source.read(np.array([row]))
    found = [path.read_bytes()[begin:end] for begin, end in asked]
    assert payloads[2] in found[0] and payloads[0] in found[1]
    begins = [begin for begin, _ in asked]
    assert asked[0][1] == path.stat().st_size and asked[1][1] < begins[0]
    assert payloads[1] not in found[0] + found[1]
