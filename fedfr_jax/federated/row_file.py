"""Rows in a sparse file, each followed by a checksum of its bytes and of its key.

A key says whose row it is and of which round, so that a row of another place or time is
as wrong as one with a flipped bit.
"""

import contextlib
import ctypes
import fcntl
import os
import pathlib
import weakref
import zlib
from collections.abc import Callable

import numpy as np

SUM_BYTES = 4
KEEP_SIZE, PUNCH_HOLE = 1, 2  # of Linux's fallocate


class RowFile:
    """`num_places` places for a row of `row_bytes` (its checksum included) each."""

    def __init__(
        self,
        path: pathlib.Path,
        num_places: int,
        row_bytes: int,
        is_read_only: bool = False,
    ):
        self.path, self.row_bytes = path, row_bytes
        self._is_read_only = is_read_only
        flags = os.O_RDONLY if is_read_only else os.O_RDWR | os.O_CREAT
        self._file = os.open(path, flags)
        weakref.finalize(self, os.close, self._file)
        if is_read_only:
            return
        if os.fstat(self._file).st_size != num_places * row_bytes:
            os.ftruncate(self._file, num_places * row_bytes)

    def read(
        self, block: np.ndarray, rows: np.ndarray, places: np.ndarray, keys: np.ndarray
    ) -> np.ndarray:
        """Fill `rows` [n] of `block` [K, row bytes] uint8 from `places` [n].

        Returns:
          [n] bool, whether each is there as it was written with its key of `keys` [n].
        """
        take = lambda part, start: os.preadv(self._file, [part], start)
        is_whole = [
            _in_full(take, block[row], place * self.row_bytes)
            for row, place in zip(rows.tolist(), places.tolist(), strict=True)
        ]
        sums = _sums((block[row] for row in rows.tolist()), keys)
        is_whole = np.array(is_whole, bool)
        return is_whole & (block[rows, -SUM_BYTES:] == sums).all(axis=1)

    def write(self, block: np.ndarray, places: np.ndarray, keys: np.ndarray) -> None:
        """Write `block` [n, row bytes], whose last bytes become the checksums.

        Raises:
          OSError: when a row cannot be written whole.
        """
        block[:, -SUM_BYTES:] = _sums(block, keys)
        put = lambda part, start: os.pwrite(self._file, part, start)
        for row, place in zip(block, places.tolist(), strict=True):
            if not _in_full(put, row, place * self.row_bytes):
                raise OSError(f"{self.path}: row {place} was written in part.")

    def drop(self, places: np.ndarray) -> None:
        """Give the disk the blocks back that `places` [n], ascending, fill alone.

        Where the file system or the C library cannot, the file stays as it is.
        """
        try:
            fallocate = ctypes.CDLL(None).fallocate
        except AttributeError:
            return
        firsts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
        for run in np.split(places, firsts)[1:]:  # neighbours at once
            start, size = int(run[0]) * self.row_bytes, len(run) * self.row_bytes
            where = ctypes.c_int64(start), ctypes.c_int64(size)
            fallocate(self._file, KEEP_SIZE | PUNCH_HOLE, *where)

    def sync(self) -> None:
        """Put everything that was written on disk."""
        os.fsync(self._file)

    def share(self) -> None:
        """Wait until nobody has the file alone, and keep it so until `free`."""
        self._lock(fcntl.LOCK_SH)

    def free(self) -> None:
        """End `share`."""
        self._lock(fcntl.LOCK_UN)

    @contextlib.contextmanager
    def alone(self):
        """While nobody else reads or writes; waits for those who do."""
        self._lock(fcntl.LOCK_EX)
        try:
            yield
        finally:
            self.free()

    def _lock(self, kind) -> None:
        """Nothing for a file that is only read, which nobody writes to any more."""
        if not self._is_read_only:
            fcntl.flock(self._file, kind)


def _sums(rows, keys):
    """[n, 4] uint8: CRC-32 of each row but for its own checksum, begun with its key."""
    starts = (keys & np.uint64(0xFFFFFFFF)).tolist()
    sums = [
        zlib.crc32(row[:-SUM_BYTES], start)
        for row, start in zip(rows, starts, strict=True)
    ]
    return np.array(sums, "<u4").view(np.uint8).reshape(-1, SUM_BYTES)


def _in_full(move: Callable, row: np.ndarray, start: int) -> bool:
    """Whether `move(part, start)` took the whole row; one call ends at 2 GiB."""
    done = 0
    while done < len(row) and (count := move(row[done:], start + done)):
        done += count
    return done == len(row)
