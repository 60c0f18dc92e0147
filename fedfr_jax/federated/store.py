"""The personal rows of all N clients, on disk, three versions each.

A row is one client's flattened personal tree. Each client has three places in a sparse
file and a stamp for each (1 + the round that wrote it, 0 for nothing); a write never
touches what the last two checkpoints see, so a run that is killed at any moment and
resumed at either, at round R, reads exactly the rows of round R: stamps after R do not
count. Nothing is written until a client takes part, and memory does not grow with N.
Where a row is empty a client has one stamp, of the first round that it took part in.

One thread writes while the next round is prepared and trained; until a round's rows are
on disk they are read from memory. An error of the writer is raised by the next call.

Processes of one run share the folder: each writes rows of its own clients, at places
that all of them know, because all keep the stamps of all rows. The first one alone
writes the stamps down, so that no two hosts change the same page of a file. Writers of
rows share a lock, since no two write at the same place; whoever opens the store
takes it alone, so that nothing of an earlier run is written after it was forgotten.
"""

import fcntl
import itertools
import mmap
import os
import pathlib
import shutil
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from fedfr_jax import trees
from fedfr_jax.types import PyTree

PROTECTED = 2  # checkpoints whose rows stay whole
VERSIONS = PROTECTED + 1
BLOCK = 2**16  # clients whose stamps are searched together


class Pending(NamedTuple):
    """Rows that are on their way to the disk."""

    ids: np.ndarray  # [K] int64, ascending
    block: np.ndarray  # [K, row bytes] uint8
    written: object  # Future


class Store:
    """Rows of `template`'s shape for `population` clients under `folder`.

    Args:
      template: pytree of arrays or shape structs, one client's personal state.
      population: N.
      folder: where the two files live; None takes a temporary folder.
      resume_round: the store's time; rows written at or after it are forgotten.
      protected: rounds of older checkpoints that may still be resumed.
      sharer: this process' number among those of a run, of which 0 comes first; None
        when it is alone.

    Raises:
      ValueError: when the files belong to another tree or population, or are not told
        in a run of several processes.
    """

    def __init__(
        self,
        template,
        population,
        folder=None,
        *,
        resume_round=0,
        protected=(),
        sharer=None,
    ):
        if folder is None and sharer is not None:
            raise ValueError(
                "store must be given a folder that all processes see, got None."
            )
        if folder is None:
            folder = tempfile.mkdtemp()
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._leaves, self._treedef = jax.tree.flatten(template)
        self._row_bytes = max(trees.num_bytes(template), 1)
        self.population = population
        self._check_layout(folder / "layout.txt", template)
        self._path = folder / "rows.bin"
        self._rows = os.open(self._path, os.O_RDWR | os.O_CREAT)
        weakref.finalize(self, os.close, self._rows)
        fcntl.flock(self._rows, fcntl.LOCK_EX)  # an earlier store may still be writing
        is_fresh = not (folder / "stamps.bin").exists()
        self._file = _open_stamps(folder / "stamps.bin", population, not sharer)
        self._stamps = np.asarray(self._file)  # indexed faster than a memmap
        self._is_shared = sharer is not None
        self._protected = tuple(sorted({*protected, resume_round}))[-PROTECTED:]
        for start in () if is_fresh else range(0, population, BLOCK):
            part = self._stamps[start : start + BLOCK]
            late = part > resume_round
            if late.any():
                part[late] = 0
        # From here on a cohort's own pages come into memory, and not those around.
        self._file.base.madvise(mmap.MADV_RANDOM)
        fcntl.flock(self._rows, fcntl.LOCK_UN)
        self._writer = ThreadPoolExecutor(1, "store")
        self._pending = None

    @property
    def template(self) -> PyTree:
        """One client's row, arrays or shape structs."""
        return jax.tree.unflatten(self._treedef, self._leaves)

    def gather(self, ids: np.ndarray) -> tuple[PyTree, np.ndarray]:
        """Rows of `ids` [K] as a tree of [K, ...] and `is_new` [K] (never written).

        A new client's row, and that of a negative id, is zero.

        Raises:
          OSError: when the last `scatter` could not write.
          ValueError: when the file ends within a row.
        """
        if not self._leaves:
            return self.template, self._is_new(ids)
        pending = self._unwritten()
        stamps = self._stamps.take(np.maximum(ids, 0), axis=0)
        newest = stamps.argmax(axis=1)
        stamps = stamps.take(VERSIONS * np.arange(len(ids)) + newest)
        is_new = (stamps == 0) | (ids < 0)
        block = np.zeros((len(ids), self._row_bytes), np.uint8)
        on_disk = ~is_new
        if pending and len(pending.ids):
            place = np.searchsorted(pending.ids, ids).clip(max=len(pending.ids) - 1)
            found = pending.ids[place] == ids
            block[found] = pending.block[place[found]]
            is_new, on_disk = is_new & ~found, on_disk & ~found
        if self._is_shared and not pending:  # a network's file system reads anew
            fcntl.flock(self._rows, fcntl.LOCK_SH)
            fcntl.flock(self._rows, fcntl.LOCK_UN)
        read = lambda part, place: os.preadv(self._rows, [part], place)
        for k in np.flatnonzero(on_disk):
            place = (int(ids[k]) * VERSIONS + int(newest[k])) * self._row_bytes
            if not _in_full(read, block[k], place):
                raise ValueError(
                    f"{self._path} must hold client {ids[k]}'s row whole, got a file "
                    "that ends before it or within it."
                )
        return self._unpack(block), is_new

    def scatter(self, ids: np.ndarray, rows: PyTree, round: int, others=()) -> None:
        """Hand `rows` (tree of [K, ...]) of `round` to the writer.

        Negative ids are skipped; the arrays must not change afterwards. `others` are
        the ids whose rows of this round other processes write.

        Raises:
          ValueError: when the rows are longer or shorter than the store's.
          OSError: when the rows before these could not be written, for instance to a
            full disk; the versions before that round stay whole.
        """
        self._wait()
        others = np.asarray(others, np.int64)
        others = others[others >= 0]
        ids, block = ids.astype(np.int64), self._pack(rows, len(ids))
        if (ids[:1] < 0).any() or (ids[1:] <= ids[:-1]).any():
            order = ids.argsort()[np.count_nonzero(ids < 0) :]
            ids, block = ids[order], block[order]
        if not self._leaves:  # that a client took part is all there is to know
            return self._mark(np.concatenate([ids, others]), round)
        fcntl.flock(self._rows, fcntl.LOCK_SH)  # other processes may write theirs
        written = self._writer.submit(self._write, ids, block, round, others)
        self._pending = Pending(ids, block, written)

    def settle(self) -> None:
        """Wait until all rows are on disk; raises the writer's OSError."""
        self._wait()

    def flush(self, round: int) -> None:
        """Put everything on disk and protect it: a checkpoint of `round` may follow."""
        self._wait()
        os.fsync(self._rows)
        self._file.flush()
        self._protected = (*self._protected, round)[-PROTECTED:]

    def touched(self) -> np.ndarray:
        """Ids that have a row, ascending, [n] int64."""
        self._wait()
        return np.flatnonzero(self._stamps.any(axis=1))

    def newest(self) -> int:
        """1 + the last round that anything was written in, 0 before any."""
        return int(self._stamps[self.touched()].max(initial=0))

    def _is_new(self, ids) -> np.ndarray:
        """Whether nothing was ever written of `ids` [K]."""
        stamps = self._stamps.take(np.maximum(ids, 0), axis=0)
        return ~stamps.any(axis=1) | (ids < 0)

    def _mark(self, ids, round) -> None:
        """Stamp those of `ids` that have no stamp yet."""
        self._stamps[ids[self._is_new(ids)], 0] = round + 1

    def _unwritten(self) -> Pending | None:
        """Rows that are not on disk yet, if any; raises the writer's error."""
        if self._pending and self._pending.written.done():
            self._wait()
        return self._pending

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending:
            pending.written.result()

    def _write(self, ids, block, round, others) -> None:
        """Rows first, then the stamps that make them count."""
        write = lambda part, place: os.pwrite(self._rows, part, place)
        try:
            places = self._free_places(np.concatenate([ids, others]), round)
            self._stamps.put(places, 0)
            for k in range(len(ids)):
                if not _in_full(write, block[k], int(places[k]) * self._row_bytes):
                    raise OSError(
                        f"{self._path}: client {ids[k]}'s row was written in part."
                    )
            self._stamps.put(places, round + 1)
        finally:
            fcntl.flock(self._rows, fcntl.LOCK_UN)

    def _free_places(self, ids, round) -> np.ndarray:
        """Where to write: the place of this round, else the oldest nobody needs [K]."""
        stamps = self._stamps.take(ids, axis=0)
        age, first = stamps.copy(), VERSIONS * np.arange(len(ids))
        for past in self._protected:
            needed = np.where(stamps <= past, stamps, 0).argmax(axis=1)
            age.put(first + needed, np.iinfo(np.int32).max)
        np.putmask(age, stamps == round + 1, -1)
        return VERSIONS * ids + age.argmin(axis=1)

    def _unpack(self, block):
        leaves, start = [], 0
        for leaf in self._leaves:
            size = trees.num_bytes(leaf)
            part = np.ascontiguousarray(block[:, start : start + size])
            leaves.append(part.view(leaf.dtype).reshape(len(block), *leaf.shape))
            start += size
        return jax.tree.unflatten(self._treedef, leaves)

    def _pack(self, rows, count):
        parts = [
            np.ascontiguousarray(np.asarray(leaf)).reshape(count, -1).view(np.uint8)
            for leaf in jax.tree.leaves(rows)
        ]
        parts = parts or [np.zeros((count, 1), np.uint8)]
        if (size := sum(part.shape[1] for part in parts)) != self._row_bytes:
            raise ValueError(
                f"client_update must give a row of {self._row_bytes} bytes, as "
                f"init_personal does, got {size}."
            )
        return np.concatenate(parts, axis=1)

    def _check_layout(self, path, template):
        lines = [f"population {self.population}"] + [
            f"{trees.path_name(p)} {tuple(x.shape)} {np.dtype(x.dtype)}"
            for p, x in jax.tree_util.tree_leaves_with_path(template)
        ]
        if not path.exists():
            draft = path.with_suffix(".tmp")
            draft.write_text("\n".join(lines))
            os.replace(draft, path)
        kept = path.read_text().splitlines()
        for old, new in itertools.zip_longest(kept, lines, fillvalue="nothing"):
            if old != new:
                raise ValueError(
                    f"store {path.parent} must hold '{new}', got '{old}': it belongs "
                    "to another model or population."
                )


def _in_full(move: Callable, row: np.ndarray, place: int) -> bool:
    """Whether `move(part, place)` took the whole row; one call ends at 2 GiB."""
    done = 0
    while done < len(row) and (count := move(row[done:], place + done)):
        done += count
    return done == len(row)


def _open_stamps(path: pathlib.Path, population: int, is_kept: bool) -> np.memmap:
    """[N, VERSIONS] int32 stamps, allocated whole so that a full disk fails here.

    Changes go to the file if they are to be kept, else to this process' memory.
    """
    size = population * VERSIONS * 4
    with open(path, "a+b") as file:
        if os.path.getsize(path) != size:
            os.posix_fallocate(file.fileno(), 0, size)
    mode = "r+" if is_kept else "c"
    return np.memmap(path, np.int32, mode, shape=(population, VERSIONS))
