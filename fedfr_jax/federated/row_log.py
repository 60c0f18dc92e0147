"""Log of client states: immutable files from which a store can be restored.

A store's rows are in one large sparse file that changes in place, which object storage
does not support. The log has for each checkpoint the rows that are new since the one
before: `<round>.ids` says of which clients and rounds they are and which process has
them, `<round>-<process>.rows` has the rows of a process. When later files outgrow the
first, all but the newest are merged.

Every process of a run writes the same lists of ids, and the rows that it has. With
another number of processes the rows of process p are those of p modulo that number.
"""

import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from fedfr_jax.files import check_file, read_npy, replace_file

FOLDER, IDS, ROWS = "log", ".ids", ".rows"
MAX_FILES = 256  # before they are merged, whatever their size
MAX_PROCESSES = 2**16
CHUNK_BYTES = 2**26  # of rows that are in memory together


class LoggedRows(NamedTuple):
    """Client states of one checkpoint."""

    population: int
    row_bytes: int  # of one, its checksum included; 0 where clients keep nothing
    ids: np.ndarray  # [n] int64, ascending
    stamps: np.ndarray  # [n] int32, see `store`
    processes: np.ndarray  # [n] int32 that have them
    path: pathlib.Path

    def check(self, process: int) -> None:
        """Raise ValueError unless the rows of a process are as long as they must be."""
        count = np.count_nonzero(self.processes == process)
        path = rows_file(self.path, process)
        check_file(path)
        size = path.stat().st_size if path.exists() else 0
        if size != count * self.row_bytes:
            raise damaged(path, f"it must have {count} states, but is truncated")

    def blocks(self, process: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (indices [m], their bytes [m, row_bytes] uint8), a chunk at a time."""
        rows = np.flatnonzero(self.processes == process)
        if not self.row_bytes:
            return
        with rows_file(self.path, process).open("rb") as file:
            for part in chunks(len(rows), self.row_bytes):
                here = rows[part]
                data = file.read(len(here) * self.row_bytes)
                yield here, np.frombuffer(data, np.uint8).reshape(len(here), -1)


def rows_file(ids: pathlib.Path, process: int) -> pathlib.Path:
    """File of the rows of a process, beside the list of ids."""
    return ids.with_name(f"{ids.stem}-{process}{ROWS}")


def process_of(path: str) -> int | None:
    """Process whose rows a file of a run has; None of all other files.

    >>> process_of("fedfr/store/log/000000003-2.rows")
    2
    """
    match = re.search(rf"/{FOLDER}/[0-9]+-([0-9]+){ROWS}$", path)
    return int(match[1]) if match else None


def chunks(count: int, row_bytes: int) -> Iterator[slice]:
    """Slices of `count` rows that are read together."""
    step = max(CHUNK_BYTES // row_bytes, 1)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def read_ids(path: pathlib.Path) -> LoggedRows:
    """Read a list of ids; every number in it is checked.

    Raises:
      ValueError: naming the file, when it is damaged.
    """
    check_file(path)
    with path.open("rb") as file:
        try:
            header = read_npy(file)
        except (ValueError, EOFError) as error:
            raise damaged(path, str(error)) from error
    if header.dtype != np.int64 or header.ndim != 2 or header.shape[1:] != (3,):
        raise damaged(path, f"its header is {header.dtype} {header.shape}")
    if not len(header) or (header < 0).any():
        raise damaged(path, "it has a negative number or none")
    (population, row_bytes, _), (ids, stamps, processes) = header[0], header[1:].T
    is_ascending = (ids[1:] > ids[:-1]).all() and (ids < population).all()
    if not is_ascending or ((stamps < 1) | (stamps >= 2**31)).any():
        raise damaged(path, f"ids do not ascend below {population}")
    if (processes >= MAX_PROCESSES).any():
        raise damaged(path, f"its processes are not below {MAX_PROCESSES}")
    numbers = stamps.astype(np.int32), processes.astype(np.int32)
    return LoggedRows(int(population), int(row_bytes), ids, *numbers, path)


def damaged(path: pathlib.Path, why: str) -> ValueError:
    """Build the error for a damaged log file."""
    return ValueError(f"{path} must be an undamaged log file, but is damaged ({why}).")


def write_blocks(path: pathlib.Path, blocks: Iterable[np.ndarray]) -> None:
    """Write the rows' bytes atomically."""
    with replace_file(path) as file:
        for block in blocks:
            file.write(block.tobytes())


class RowLog:
    """Log in the folder of a store.

    Args:
      read: (ids [n], stamps [n]) -> the rows' bytes [n, row_bytes] uint8.
      process: number of this one.
    """

    def __init__(
        self,
        store: pathlib.Path,
        population: int,
        row_bytes: int,
        read: Callable,
        process: int = 0,
    ):
        self._folder, self._process = store / FOLDER, process
        self._sizes, self._read = (population, row_bytes, 0), read

    def forget_after(self, round: int) -> None:
        """Remove the files of checkpoints after `round`."""
        for path in self._folder.glob("*"):
            if _round(path) > round:
                path.unlink()

    def add(self, round: int, select: Callable) -> None:
        """Add the client states since the newest file, for `round`'s checkpoint.

        Args:
          select: (after, until) -> ids [n], stamps [n] int32 of the newest rows until
            that round, of those that were written after the other, and the processes
            [n] that have them.
        """
        files = log_files(self._folder.parent)
        last = _round(files[-1]) if files else 0
        if _is_outgrown(files):  # what the checkpoint before sees, in one file
            merged = self._write(last, *select(0, last))
            for path in self._folder.glob("*"):
                if _round(path) <= last and path not in merged:
                    path.unlink()
        self._write(round, *select(last, round))

    def _write(self, round, ids, stamps, processes) -> set[pathlib.Path]:
        """Write the rows that this process has, then the list of all."""
        path = self._folder / f"{round:09d}{IDS}"
        mine, row_bytes = processes == self._process, self._sizes[1]
        written = {path}
        if row_bytes and mine.any():
            own_ids, own_stamps = ids[mine], stamps[mine]
            parts = chunks(len(own_ids), row_bytes)
            blocks = (self._read(own_ids[part], own_stamps[part]) for part in parts)
            written.add(rows_file(path, self._process))
            write_blocks(rows_file(path, self._process), blocks)
        lines = np.stack([ids, stamps, processes], axis=1).astype(np.int64)
        with replace_file(path) as file:
            np.save(file, np.concatenate([np.array([self._sizes], np.int64), lines]))
        return written


def log_files(store: pathlib.Path) -> list[pathlib.Path]:
    """Lists of ids of a store's log, the oldest first."""
    return sorted((store / FOLDER).glob(f"*{IDS}"), key=_round)


def _round(path: pathlib.Path) -> int:
    return int(re.split("[-.]", path.name)[0])


def _is_outgrown(files: list[pathlib.Path]) -> bool:
    """Whether later files have more clients than the first, or are too many."""
    sizes = [path.stat().st_size for path in files]
    return len(files) > 2 and (sum(sizes[1:]) > sizes[0] or len(files) > MAX_FILES)
