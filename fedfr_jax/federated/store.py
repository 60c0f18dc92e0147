"""The personal rows of all N clients, on disk, three versions each while they train.

A row is one client's flattened personal tree. Each client has three places in a sparse
file and a stamp for each (1 + the round that wrote it, 0 for nothing); a write never
touches what the last two checkpoints see, so a run that is killed at any moment and
resumed at either, at round R, reads exactly the rows of round R: stamps after R do not
count. Nothing is written until a client takes part, and memory does not grow with N.
When a stage has ended, `keep_newest` frees all versions but the newest.
Where a row is empty a client has one stamp, of the first round that it took part in.

A row has a checksum, and the stamps that a checkpoint sees have a number in seals.txt:
what is damaged or lost is refused, never read as something else or as a new client.

One thread writes while the next round is prepared and trained; until a round's rows are
on disk they are read from memory. An error of the writer is raised by the next call.

Processes of one run share the folder: each writes rows of its own clients, at places
that all of them know, because all keep the stamps of all rows. The first one alone
writes the stamps down, so that no two hosts change the same page of a file. Writers of
rows share a lock, since no two write at the same place; whoever opens the store
takes it alone, so that nothing of an earlier run is written after it was forgotten.
"""

import mmap
import pathlib
import shutil
import tempfile
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from fedfr_jax import trees
from fedfr_jax.federated import seals
from fedfr_jax.federated.row_file import SUM_BYTES, RowFile
from fedfr_jax.federated.rows import pack, unpack
from fedfr_jax.federated.store_files import (
    check_layout,
    check_sizes,
    lost,
    open_stamps,
    written_blocks,
)
from fedfr_jax.types import PyTree

PROTECTED = 2  # checkpoints whose rows stay whole
VERSIONS = PROTECTED + 1
SEALS = "seals.txt"


class Pending(NamedTuple):
    """Rows that are on their way to the disk."""

    ids: np.ndarray  # [K] int64, ascending
    block: np.ndarray  # [K, row bytes] uint8, each row's checksum included
    written: object  # Future


class Store:
    """Rows of `template`'s shape for `population` clients under `folder`.

    Args:
      template: pytree of arrays or shape structs, one client's personal state.
      population: N.
      folder: where the files live; None takes a temporary folder.
      resume_round: the store's time, 0 or that of a `flush`; rows written at or after
        it are forgotten.
      protected: rounds of older checkpoints that may still be resumed.
      sharer: this process' number among those of a run, of which 0 comes first; None
        when it is alone.
      is_read_only: the files exist, and stay as they are.

    Raises:
      ValueError: when the files belong to another tree or population, are not what they
        were at the `flush` of `resume_round`, or lack a folder that processes share.
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
        is_read_only=False,
    ):
        if folder is None and sharer is not None:
            raise ValueError(
                "store must be given a folder that all processes see, got None."
            )
        is_own = folder is None
        if is_own:
            folder = tempfile.mkdtemp()
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._folder = pathlib.Path(folder)
        self._leaves, self._treedef = jax.tree.flatten(template)
        self._row_bytes = max(trees.num_bytes(template), 1) + SUM_BYTES
        self.population = population
        num_places = population * VERSIONS
        if is_resumed := resume_round > 0 and not is_own:
            sizes = {"rows": num_places * self._row_bytes, "stamps": 4 * num_places}
            check_sizes(self._folder, **sizes)
        self._folder.mkdir(parents=True, exist_ok=True)
        check_layout(self._folder / "layout.txt", template, population)
        path = self._folder / "rows.bin"
        self._rows = RowFile(path, num_places, self._row_bytes, is_read_only)
        self._is_shared = sharer is not None
        self._is_kept = not (sharer or is_read_only)
        with self._rows.alone():  # an earlier store may still be writing
            path = self._folder / "stamps.bin"
            modes = self._is_kept, is_read_only
            self._file = open_stamps(path, population, VERSIONS, *modes)
            self._stamps = np.asarray(self._file)  # indexed faster than a memmap
            self._seal = seals.forget_after(
                self._stamps, resume_round, self._written_blocks()
            )
            kept = seals.read_seals(self._folder / SEALS)
            if is_resumed and kept.get(resume_round) != self._seal:
                got = f"stamps of another state than round {resume_round}'s in {SEALS}"
                raise lost(self._folder, got)
        # From here on a cohort's own pages come into memory, and not those around.
        self._file.base.madvise(mmap.MADV_RANDOM)
        self._protected = tuple(sorted({*protected, resume_round}))[-PROTECTED:]
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
          ValueError: when a row is not as it was written.
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
            self._rows.share()
            self._rows.free()
        rows = np.flatnonzero(on_disk)
        self._read(block, rows, ids[rows], newest[rows], stamps[rows])
        leaves = unpack(block, self._leaves)
        return jax.tree.unflatten(self._treedef, leaves), is_new

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
        block = pack(rows, len(ids), self._row_bytes)
        ids = ids.astype(np.int64)
        if (ids[:1] < 0).any() or (ids[1:] <= ids[:-1]).any():
            order = ids.argsort()[np.count_nonzero(ids < 0) :]
            ids, block = ids[order], block[order]
        if not self._leaves:  # that a client took part is all there is to know
            return self._mark(np.concatenate([ids, others]), round)
        self._rows.share()  # other processes may write theirs
        written = self._writer.submit(self._write, ids, block, round, others)
        self._pending = Pending(ids, block, written)

    def settle(self) -> None:
        """Wait until all rows are on disk; raises the writer's OSError."""
        self._wait()

    def flush(self, round: int) -> None:
        """Put everything on disk and protect it: a checkpoint of `round` may follow."""
        self._wait()
        self._rows.sync()
        self._file.flush()
        self._protected = (*self._protected, round)[-PROTECTED:]
        if self._is_kept:
            path = self._folder / SEALS
            earlier = sorted(r for r in seals.read_seals(path).items() if r[0] < round)
            kept = dict([*earlier[-PROTECTED:], (round, self._seal)])
            seals.write_seals(path, kept)

    def keep_newest(self) -> None:
        """Free all versions but the newest: a stage has ended, with a `flush`.

        It can go on from its last checkpoint; one before is refused. Killed at any
        moment, the rows of the last are whole, and the next call frees the rest.
        """
        self._wait()
        if not self._leaves:
            return
        if self._is_kept:
            seals.write_seals(self._folder / SEALS, {self._protected[-1]: self._seal})
        for start in self._written_blocks():
            part = self._stamps[start : start + seals.BLOCK]
            is_old = (part > 0) & (part < part.max(axis=1, keepdims=True))
            if self._is_kept:  # one process is enough, as all have written theirs
                self._rows.drop(start * VERSIONS + np.flatnonzero(is_old))
            part[is_old] = 0

    def touched(self) -> np.ndarray:
        """Ids that have a row, ascending, [n] int64."""
        self._wait()
        found = [np.zeros(0, np.int64)]
        for start in self._written_blocks():
            part = self._stamps[start : start + seals.BLOCK]
            found.append(start + np.flatnonzero(part.any(axis=1)))
        return np.concatenate(found)

    def newest(self) -> int:
        """1 + the last round that anything was written in, 0 before any."""
        return int(self._stamps[self.touched()].max(initial=0))

    def _written_blocks(self):
        """First clients of the blocks in which anybody may have a stamp."""
        if not self._is_kept:  # this process' own stamps are in no file
            return range(0, self.population, seals.BLOCK)
        self._file.flush()  # until then a page may look like a hole
        path = self._folder / "stamps.bin"
        return written_blocks(path, VERSIONS * 4, seals.BLOCK)

    def _is_new(self, ids) -> np.ndarray:
        """Whether nothing was ever written of `ids` [K]."""
        stamps = self._stamps.take(np.maximum(ids, 0), axis=0)
        return ~stamps.any(axis=1) | (ids < 0)

    def _mark(self, ids, round) -> None:
        """Stamp those of `ids` that have no stamp yet."""
        ids = ids[self._is_new(ids)]
        before, self._stamps[ids, 0] = self._stamps[ids, 0], round + 1
        self._seal = seals.moved(self._seal, ids, before, self._stamps[ids, 0])

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
        everyone = np.concatenate([ids, others])
        try:
            before = self._stamps.take(everyone, axis=0).max(axis=1)
            places = self._free_places(everyone, round)
            after = np.full(len(everyone), round + 1)
            self._stamps.put(places, 0)
            keys = seals.keys_of(everyone, after)
            self._rows.write(block, places[: len(ids)], keys[: len(ids)])
            self._stamps.put(places, round + 1)
            self._seal = seals.moved(self._seal, everyone, before, after)
        finally:
            self._rows.free()

    def _read(self, block, rows, ids, versions, stamps) -> None:
        """Fill `rows` of `block` with what clients `ids` have in their `versions`."""
        keys = seals.keys_of(ids, stamps)
        is_whole = self._rows.read(block, rows, ids * VERSIONS + versions, keys)
        if not is_whole.all():
            client = ids[is_whole.argmin()]
            raise lost(self._folder, f"another row of client {client} in rows.bin")

    def _free_places(self, ids, round) -> np.ndarray:
        """Where to write: the place of this round, else the oldest nobody needs [K]."""
        stamps = self._stamps.take(ids, axis=0)
        age, first = stamps.copy(), VERSIONS * np.arange(len(ids))
        for past in self._protected:
            needed = np.where(stamps <= past, stamps, 0).argmax(axis=1)
            age.put(first + needed, np.iinfo(np.int32).max)
        np.putmask(age, stamps == round + 1, -1)
        return VERSIONS * ids + age.argmin(axis=1)
