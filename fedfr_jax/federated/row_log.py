"""Log of client states: immutable files from which a store can be restored.

A store's rows are in one large sparse file that changes in place, which object storage
does not support. The log has a file per checkpoint, `<round>.rows`, with the rows that
are new since the one before. When later files outgrow the first, all but the newest are
merged.
"""

import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from fedfr_jax.files import check_file, read_npy, replace_file

FOLDER, SUFFIX = "log", ".rows"
MAX_FILES = 256  # before they are merged, whatever their size
CHUNK_BYTES = 2**26  # of rows that are in memory together


class LoggedRows(NamedTuple):
    """Client states of one file: ids, rounds, and position of the data."""

    population: int
    row_bytes: int  # of one, its checksum included; 0 where clients keep nothing
    ids: np.ndarray  # [n] int64, ascending
    stamps: np.ndarray  # [n] int32, see `store`
    path: pathlib.Path
    start: int  # byte of the first row

    def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield (which rows, their bytes [n, row_bytes] uint8), a chunk at a time."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            for part in chunks(len(self.ids), self.row_bytes):
                count = part.stop - part.start
                data = file.read(count * self.row_bytes)
                yield part, np.frombuffer(data, np.uint8).reshape(count, -1)


def chunks(count: int, row_bytes: int) -> Iterator[slice]:
    """Slices of `count` rows that are read together; none for rows of 0 bytes."""
    step = max(CHUNK_BYTES // max(row_bytes, 1), 1)
    for start in range(0, count if row_bytes else 0, step):
        yield slice(start, min(start + step, count))


def read_rows(path: pathlib.Path) -> LoggedRows:
    """Read the header of a log file; every number in it is compared with the file.

    Raises:
      ValueError: naming the file, when it is damaged.
    """
    check_file(path)
    with path.open("rb") as file:
        try:
            header = read_npy(file)
        except (ValueError, EOFError) as error:
            raise damaged(path, str(error)) from error
        start, end = file.tell(), os.fstat(file.fileno()).st_size
    if header.dtype != np.int64 or header.ndim != 2 or header.shape[1:] != (2,):
        raise damaged(path, f"its header is {header.dtype} {header.shape}")
    if not len(header) or (header < 0).any():
        raise damaged(path, "it has a negative number or none")
    (population, row_bytes), (ids, stamps) = header[0].tolist(), header[1:].T
    is_ascending = (ids[1:] > ids[:-1]).all() and (ids < population).all()
    if not is_ascending or ((stamps < 1) | (stamps >= 2**31)).any():
        raise damaged(path, f"ids do not ascend below {population}")
    if len(ids) * row_bytes != end - start:
        raise damaged(path, f"it must have {len(ids)} states, but is truncated")
    return LoggedRows(population, row_bytes, ids, stamps.astype(np.int32), path, start)


def damaged(path: pathlib.Path, why: str) -> ValueError:
    """Build the error for a damaged log file."""
    return ValueError(f"{path} must be an undamaged log file, but is damaged ({why}).")


def write_rows(
    path: pathlib.Path,
    population: int,
    row_bytes: int,
    ids: np.ndarray,
    stamps: np.ndarray,
    blocks: Iterable[np.ndarray],
) -> None:
    """Write a log file atomically; `blocks` are the rows' bytes, in order."""
    sizes = np.array([[population, row_bytes]], np.int64)
    clients = np.stack([ids, stamps], axis=1).astype(np.int64)
    with replace_file(path) as file:
        np.save(file, np.concatenate([sizes, clients]))
        for block in blocks:
            file.write(block.tobytes())


class RowLog:
    """Log in the folder of a store.

    Args:
      read: (ids [n], stamps [n]) -> the rows' bytes [n, row_bytes] uint8.
    """

    def __init__(
        self, store: pathlib.Path, population: int, row_bytes: int, read: Callable
    ):
        self._folder = store / FOLDER
        self._sizes, self._read = (population, row_bytes), read

    def forget_after(self, round: int) -> None:
        """Remove the files of checkpoints after `round`."""
        for path in log_files(self._folder.parent):
            if _round(path) > round:
                path.unlink()

    def add(self, round: int, select: Callable) -> None:
        """Add the client states since the newest file, for `round`'s checkpoint.

        Args:
          select: (after, until) -> ids [n] and stamps [n] int32 of the newest rows
            until that round, of those that were written after the other.
        """
        files = log_files(self._folder.parent)
        last = _round(files[-1]) if files else 0
        if _is_outgrown(files):  # what the checkpoint before sees, in one file
            self._write(last, *select(0, last))
            for path in files[:-1]:
                path.unlink()
        self._write(round, *select(last, round))

    def _write(self, round, ids, stamps):
        path = self._folder / f"{round:09d}{SUFFIX}"
        parts = chunks(len(ids), self._sizes[1])
        blocks = (self._read(ids[part], stamps[part]) for part in parts)
        write_rows(path, *self._sizes, ids, stamps, blocks)


def log_files(store: pathlib.Path) -> list[pathlib.Path]:
    """Files of a store's log, the oldest first."""
    return sorted((store / FOLDER).glob(f"*{SUFFIX}"), key=_round)


def _round(path: pathlib.Path) -> int:
    return int(path.name.removesuffix(SUFFIX))


def _is_outgrown(files: list[pathlib.Path]) -> bool:
    """Whether later files have more bytes than the first, or are too many."""
    sizes = [path.stat().st_size for path in files]
    return len(files) > 2 and (sum(sizes[1:]) > sizes[0] or len(files) > MAX_FILES)
