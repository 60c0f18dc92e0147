"""Client-state store: the personal states of all N clients, on disk.

A row is one client's flattened personal tree. Each client has three places for it in a
sparse file, `rows.bin`, and a stamp for each in `stamps.bin` (1 + the round that wrote
it, 0 for none). A write never touches what the last two checkpoints see, so a run that
is killed at any moment and resumed at either, at round R, reads exactly the rows of
round R: later stamps do not count. Nothing is written until a client takes part, and
memory does not grow with N. When a stage has ended, `keep_newest` frees all versions
but the newest. Of clients without a state only the stamps are written.

A row ends in a checksum of its bytes, its client and its round, and `seals.txt` has a
checksum of the stamps that each checkpoint sees: a sum over clients of their newest
stamps, so a round changes it by its cohort alone. What is damaged or lost is refused,
never read as something else or as a new client. `layout.txt` names population and
leaves.

One thread writes while the next round is prepared and trained; until a round's rows are
on disk they are read from memory. An error of the writer is raised by the next call.

Processes of one run share the folder: each writes the rows of its own clients, and all
keep the stamps of all rows. Only the first process writes the stamps, so that no two
hosts change the same page of a file. Writers of rows share a lock, since no two write
at the same place; opening the store takes it exclusively, so that nothing of an earlier
run is written later.

Processes of a run in a bucket have a folder each. A row stays with the process that has
trained its client last, which `owners.bin` names of all rows, until another process is
to train it, and gets it through the bucket, see `row_exchange`.
"""

import contextlib
import ctypes
import fcntl
import itertools
import math
import mmap
import os
import pathlib
import shutil
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from fedfr_jax import trees
from fedfr_jax.federated.row_exchange import Readers, RowExchange
from fedfr_jax.federated.row_log import RowLog, log_files, read_ids
from fedfr_jax.files import check_bytes, naming, write_text
from fedfr_jax.types import PyTree

BLOCK = 2**12  # clients whose stamps are searched together
FORMAT = "rows with checksums"  # the first line of layout.txt
CHECKSUMS = "seals.txt"
OWNERS = "owners.bin"  # process that has a row, uint16 of each place
SUM_BYTES = 4
PROTECTED = 2  # checkpoints whose rows are never overwritten
VERSIONS = PROTECTED + 1
Rows = Sequence[np.ndarray] | np.ndarray  # n rows, each [row bytes] uint8
KEEP_SIZE, PUNCH_HOLE = 1, 2  # of Linux's fallocate


def checksum_keys(ids: np.ndarray, stamps: np.ndarray) -> np.ndarray:
    """Hash [n] uint64 of every client and stamp; 0 if there is no stamp."""
    mixed = ids.astype(np.uint64) << np.uint64(32) | stamps.astype(np.uint64)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # as in SplitMix64
        mixed = (mixed ^ mixed >> np.uint64(31)) * np.uint64(factor)
    return np.where(stamps > 0, mixed, np.uint64(0))


def drop_after(stamps: np.ndarray, round: int, starts: Iterable[int]) -> np.uint64:
    """Remove stamps [N, versions] after `round`; return the others' checksum.

    Args:
      starts: of the blocks of clients that may have stamps.
    """
    checksum = np.zeros(1, np.uint64)  # arrays wrap around without a warning
    for start in starts:
        part = stamps[start : start + BLOCK]
        late = part > round
        if late.any():
            part[late] = 0
        if part.any():
            ids = np.arange(start, start + len(part))
            checksum += checksum_keys(ids, part.max(axis=1)).sum()
    return checksum[0]


def read_checksums(path: pathlib.Path) -> dict[int, int]:
    """Read {round: checksum}; {} if the file is missing or damaged."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        return {int(round): int(sum) for round, sum in map(str.split, lines)}
    except (FileNotFoundError, ValueError):
        return {}


def write_checksums(path: pathlib.Path, checksums: dict[int, int]) -> None:
    """Write the checksums atomically, to disk."""
    write_text(path, "".join(f"{round} {sum}\n" for round, sum in checksums.items()))


def check_layout(path: pathlib.Path, template: PyTree, population: int) -> None:
    """Write the layout of the client states, or raise ValueError if it differs."""
    lines = [FORMAT, f"population {population}"] + [
        f"{name} {tuple(x.shape)} {np.dtype(x.dtype)}"
        for name, x in trees.by_name(template).items()
    ]
    if not path.exists():
        write_text(path, "\n".join(lines))
    old_lines = path.read_text(errors="replace").splitlines()
    for old, new in itertools.zip_longest(old_lines, lines, fillvalue="nothing"):
        if old != new:
            raise ValueError(
                f"store {path.parent} must have the layout '{new}', got '{old}' of "
                "another model, population or version. Use another --workdir."
            )


def lost_states(folder: pathlib.Path, got: str) -> ValueError:
    """Build the error for lost client states, with what to do."""
    return ValueError(
        f"{folder} must hold the personal rows as written, got {got}. Rows are lost: "
        f"rerun with --overwrite={folder.parent.name} to retrain that stage; earlier "
        "stages are kept."
    )


def allocate(path: pathlib.Path, size: int) -> None:
    """Make a file of `size` bytes, with disk space, so that a full disk fails here."""
    with open(path, "a+b") as file:
        if os.path.getsize(path) != size:
            with naming(path):
                file.truncate(size)
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)


def written_blocks(path: pathlib.Path, block_bytes: int) -> Iterator[int]:
    """Yield the numbers of the blocks that have data in a sparse file.

    A file system that knows no holes has data everywhere.
    """
    size, start = os.path.getsize(path), 0
    with open(path, "rb") as file:
        while start < size:
            try:
                start = os.lseek(file.fileno(), start, os.SEEK_DATA)
            except OSError:  # nothing from here on
                return
            number = start // block_bytes
            yield number
            start = (number + 1) * block_bytes


class StateFile:
    """File with `num_places` client states of `row_bytes` each, checksum included."""

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
        size = num_places * row_bytes
        if not is_read_only and os.fstat(self._file).st_size != size:
            os.ftruncate(self._file, size)

    def read(self, rows: Rows, places: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Read the rows at `places` [n] into `rows`.

        Returns:
          [n] bool, whether each is there as it was written with its key of `keys` [n].
        """

        def read_part(part, start):
            return os.preadv(self._file, [part], start)

        is_whole = self._move_all(read_part, rows, places)
        found = np.array([row[-SUM_BYTES:] for row in rows]).reshape(-1, SUM_BYTES)
        return is_whole & (found == _sums(rows, keys)).all(axis=1)

    def write(self, rows: Rows, places: np.ndarray) -> None:
        """Write `rows`, checksums included, to `places` [n]."""

        def write_part(part, start):
            return os.pwrite(self._file, part, start)

        with naming(self.path):
            is_whole = self._move_all(write_part, rows, places)
        if not is_whole.all():
            raise OSError(f"{self.path}: a row was only written in part.")

    def _move_all(self, move: Callable, rows: Rows, places: np.ndarray) -> np.ndarray:
        """Read or write rows by `move(part, start) -> bytes`; [n] bool: it is whole.

        A call of the operating system moves at most 2 GiB.
        """
        is_whole = np.ones(len(rows), bool)
        for i, (row, place) in enumerate(zip(rows, places.tolist(), strict=True)):
            start = place * self.row_bytes
            while len(row) and (count := move(row, start)):
                row, start = row[count:], start + count
            is_whole[i] = not len(row)
        return is_whole

    def drop(self, places: np.ndarray) -> None:
        """Free the disk blocks that only `places` [n], ascending, occupy.

        Where the file system or the C library cannot, the file stays as it is.
        """
        try:
            fallocate = ctypes.CDLL(None).fallocate
        except AttributeError:
            return
        firsts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
        for run in np.split(places, firsts)[1:]:  # neighbors at once
            start = ctypes.c_int64(int(run[0]) * self.row_bytes)
            size = ctypes.c_int64(len(run) * self.row_bytes)
            fallocate(self._file, KEEP_SIZE | PUNCH_HOLE, start, size)

    def sync(self) -> None:
        """Sync the file to disk."""
        with naming(self.path):
            os.fsync(self._file)

    def lock(self, kind: int) -> None:
        """Lock the file by `fcntl.LOCK_SH`, `LOCK_EX` or `LOCK_UN`, if it may change.

        A lock makes NFS drop cached pages.
        """
        if not self._is_read_only:
            fcntl.flock(self._file, kind)


def _sums(rows: Rows, keys: np.ndarray) -> np.ndarray:
    """CRC-32 [n, 4] uint8 of each row without its checksum, seeded with its key."""
    starts = (keys & np.uint64(0xFFFFFFFF)).tolist()
    pairs = zip(rows, starts, strict=True)
    sums = [zlib.crc32(row[:-SUM_BYTES].data, start) for row, start in pairs]
    return np.array(sums, "<u4").view(np.uint8).reshape(-1, SUM_BYTES)


def pack_rows(rows: PyTree, count: int, row_bytes: int) -> np.ndarray:
    """Pack `rows` [count, ...] to bytes [count, row_bytes], room for a checksum."""
    leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(rows)]
    parts = [
        leaf.reshape(count, math.prod(leaf.shape[1:])).view(np.uint8) for leaf in leaves
    ]
    parts = parts or [np.zeros((count, 1), np.uint8)]
    state_bytes = row_bytes - SUM_BYTES
    if (size := sum(part.shape[1] for part in parts)) != state_bytes:
        raise ValueError(
            f"client_update must return a personal state of {state_bytes} bytes, as "
            f"init_personal does, got {size}."
        )
    parts.append(np.zeros((count, SUM_BYTES), np.uint8))
    return np.concatenate(parts, axis=1)


def unpack_rows(block: np.ndarray, leaves: Sequence) -> list[np.ndarray]:
    """Unpack arrays [K, ...] like `leaves` from rows [K, row bytes] uint8."""
    arrays, start = [], 0
    for leaf in leaves:
        size = trees.num_bytes(leaf)
        part = block[:, start : start + size].view(leaf.dtype)
        arrays.append(part.reshape(len(block), *leaf.shape))
        start += size
    return arrays


class UnwrittenRows(OSError):
    """Client states that could not be written to disk."""


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Raise an OSError of the block as one of client states."""
    try:
        yield
    except UnwrittenRows:
        raise
    except OSError as error:
        unwritten = UnwrittenRows(f"client states could not be written ({error})")
        unwritten.errno = error.errno
        raise unwritten from error


class PendingWrite(NamedTuple):
    """Client states that are being written to disk."""

    ids: np.ndarray  # [K] int64, ascending
    block: np.ndarray  # [K, row bytes] uint8, each row's checksum included
    written: Future


class Store:
    """Personal states like `template` of `population` clients, under `folder`.

    Args:
      template: pytree of arrays or shape structs, one client's personal state.
      population: N.
      folder: where the files live; None takes a temporary folder.
      resume_round: the round to resume at, 0 or that of a `flush`; rows of this round
        and later ones are dropped.
      protected: rounds of older checkpoints that may still be resumed.
      sharer: index of this process among those of a run; None for a single process.
      is_read_only: the files exist, and stay as they are.
      is_mirrored: the folder is copied elsewhere with every checkpoint, no other
        process uses it, and it has a log of its rows.
      exchange: with the other processes of a run that have rows; None: there are none.

    Raises:
      ValueError: when the files belong to another tree or population, are not what they
        were at the `flush` of `resume_round`, or lack a folder that processes share.
    """

    def __init__(
        self,
        template: PyTree,
        population: int,
        folder: str | os.PathLike | None = None,
        *,
        resume_round: int = 0,
        protected: Sequence[int] = (),
        sharer: int | None = None,
        is_read_only: bool = False,
        is_mirrored: bool = False,
        exchange: RowExchange | None = None,
    ):
        if folder is None:
            if sharer is not None:
                raise ValueError(
                    "a store needs a folder that all processes can access, got None."
                )
            folder, resume_round = tempfile.mkdtemp(), 0
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._folder = pathlib.Path(folder)
        self._leaves, self._treedef = jax.tree.flatten(template)
        self._row_bytes = max(trees.num_bytes(template), 1) + SUM_BYTES
        self.population = population
        num_places = population * VERSIONS
        rows_path, stamps_path = self._folder / "rows.bin", self._folder / "stamps.bin"
        if resume_round:
            self._check_size(rows_path, num_places * self._row_bytes)
            self._check_size(stamps_path, num_places * 4)
        self._folder.mkdir(parents=True, exist_ok=True)
        check_layout(self._folder / "layout.txt", template, population)
        self._rows = StateFile(rows_path, num_places, self._row_bytes, is_read_only)
        self._is_shared = sharer is not None
        self._is_kept = not (sharer or is_read_only)  # this process' stamps, in a file
        with self._locked(fcntl.LOCK_EX):  # an earlier store may still be writing
            if not is_read_only:
                allocate(stamps_path, num_places * 4)
            mode = "r+" if self._is_kept else "c"  # "c": changed in memory only
            shape = population, VERSIONS
            self._file = np.memmap(stamps_path, np.int32, mode, shape=shape)
            self._stamps = np.asarray(self._file)  # indexed faster than a memmap
            starts = self._written_blocks()
            self._checksum = drop_after(self._stamps, resume_round, starts)
            saved = read_checksums(self._folder / CHECKSUMS).get(resume_round)
            if resume_round and saved != self._checksum:
                got = f"stamps of another round than {resume_round} in {CHECKSUMS}"
                raise lost_states(self._folder, got)
        self._exchange, self._owners = exchange, np.zeros((0, VERSIONS), np.uint16)
        if exchange:
            path = self._folder / OWNERS
            allocate(path, num_places * 2)
            self._owners = np.asarray(np.memmap(path, np.uint16, "r+", shape=shape))
        # From here on only the pages of a cohort are read, without read-ahead.
        pages: Any = self._file.base
        pages.madvise(mmap.MADV_RANDOM)
        self._protected = tuple(sorted({*protected, resume_round}))[-PROTECTED:]
        self._writer = ThreadPoolExecutor(1, "store")
        self._lock = threading.RLock()  # of a thread that reads ahead and the main one
        self._pending: PendingWrite | None = None
        self._log = None
        if is_mirrored and not is_read_only:
            size = self._row_bytes if self._leaves else 0
            here = exchange.process if exchange else 0
            self._log = RowLog(self._folder, population, size, self._logged, here)
            self._log.forget_after(resume_round)

    @property
    def name(self) -> str:
        """Name of the store among those of a run."""
        return self._folder.parent.name

    @property
    def template(self) -> PyTree:
        """Pytree of one client's state, as arrays or ShapeDtypeStructs."""
        return jax.tree.unflatten(self._treedef, self._leaves)

    def gather(
        self, ids: np.ndarray, readers: Readers | None = None
    ) -> tuple[PyTree, np.ndarray]:
        """Load the states of clients `ids` [K]: tree of [K, ...], and `is_new` [K].

        A new client's row, and that of a negative id, is zero.

        Args:
          readers: of a store with an exchange, the clients that all processes load in
            this call; None: all of them load `ids`.
        """
        if not self._exchange or not self._leaves:
            with self._lock:
                return self._gather(ids)
        readers = readers or self._exchange.everywhere(ids)
        with self._lock:
            self.settle()
            stamps = self._newest_stamps(readers.clients)
            owners = self._owners_of(readers.clients, stamps)
            moved = self._exchange.plan(readers, np.where(stamps > 0, owners, -1))
            clients, stamps = moved.clients, stamps[moved.indices]
            mine = moved.owners == self._exchange.process
            sent = self._logged(clients[mine], stamps[mine])
        received = self._exchange.pass_on(self.name, readers.name, moved, sent)
        keys = checksum_keys(clients[moved.is_received], stamps[moved.is_received])
        if (received[:, -SUM_BYTES:] != _sums(received, keys)).any():
            raise OSError(f"client states came to {self._folder} with other bytes.")
        with self._lock:
            return self._gather(ids, clients[moved.is_received], received)

    def readers(self, clients: np.ndarray, processes: np.ndarray) -> Readers | None:
        """Readers of a call that all processes make, in the same order of calls."""
        return self._exchange and self._exchange.readers(clients, processes)

    def _newest_stamps(self, ids: np.ndarray) -> np.ndarray:
        """Newest stamps [n] of clients, 0 without one or of a negative id."""
        stamps = self._stamps.take(np.maximum(ids, 0), axis=0).max(axis=1)
        return np.where(ids < 0, 0, stamps)

    def _owners_of(self, ids: np.ndarray, stamps: np.ndarray) -> np.ndarray:
        """Processes [n] that have the rows of clients with these stamps."""
        if not self._exchange:
            return np.zeros(len(ids), np.int32)
        return self._owners[ids, self._versions_of(ids, stamps)].astype(np.int32)

    def _versions_of(self, ids: np.ndarray, stamps: np.ndarray) -> np.ndarray:
        return (self._stamps.take(ids, axis=0) == stamps[:, None]).argmax(axis=1)

    def _gather(
        self, ids: np.ndarray, received_ids: Sequence | np.ndarray = (), received=()
    ) -> tuple[PyTree, np.ndarray]:
        """`gather`; of clients `received_ids`, ascending, rows are `received`."""
        if self._pending and (self._pending.written.done() or not self._leaves):
            self.settle()
        pending, stamps = self._pending, self._newest_stamps(ids)
        is_new = stamps == 0
        block = np.zeros((len(ids), self._row_bytes), np.uint8)
        on_disk = ~is_new
        in_memory = [(pending.ids, pending.block)] if pending else []
        for known, rows in (*in_memory, (received_ids, received)):
            if len(known):
                place = np.searchsorted(known, ids).clip(max=len(known) - 1)
                is_known = np.asarray(known)[place] == ids
                block[is_known] = rows[place[is_known]]
                is_new, on_disk = is_new & ~is_known, on_disk & ~is_known
        if not self._leaves:
            return self.template, is_new
        if self._is_shared and not pending:  # for rows of other processes on NFS
            with self._locked(fcntl.LOCK_SH):
                pass
        rows = [block[i] for i in np.flatnonzero(on_disk)]
        self._read(rows, ids[on_disk], stamps[on_disk])
        leaves = unpack_rows(block, self._leaves)
        return jax.tree.unflatten(self._treedef, leaves), is_new

    def scatter(
        self,
        ids: np.ndarray,
        rows: PyTree,
        round: int | np.ndarray,
        remote_ids: Sequence[int] | np.ndarray = (),
        remote_owners: Sequence[int] | np.ndarray = (),
    ) -> None:
        """Write states `rows`, a tree of [K, ...], of `round` in the background.

        Negative ids are skipped; the arrays must not change afterwards. Other processes
        write the rows of the clients `remote_ids`, with an exchange `remote_owners`.
        `round` is that of all of them, or one of each, first of `ids`.

        Raises:
          ValueError: when the rows are longer or shorter than the store's.
          OSError: when the rows before these could not be written, for instance to a
            full disk; the versions before that round stay whole.
        """
        remote_ids = np.asarray(remote_ids, np.int64)
        rounds = np.broadcast_to(round, len(ids) + len(remote_ids))
        rounds, remote_rounds = rounds[: len(ids)], rounds[len(ids) :]
        remote_rounds = remote_rounds[remote_ids >= 0]
        if self._exchange:
            remote_owners = np.asarray(remote_owners, np.uint16)[remote_ids >= 0]
        remote_ids = remote_ids[remote_ids >= 0]
        remote = remote_ids, remote_owners
        block = pack_rows(rows, len(ids), self._row_bytes)
        ids = ids.astype(np.int64)
        if (ids[:1] < 0).any() or (ids[1:] <= ids[:-1]).any():
            order = ids.argsort()[np.count_nonzero(ids < 0) :]
            ids, block, rounds = ids[order], block[order], rounds[order]
        rounds = np.concatenate([rounds, remote_rounds])
        with self._lock:
            self.settle()
            self._rows.lock(fcntl.LOCK_SH)  # other processes may write theirs
            written = self._writer.submit(self._write, ids, block, rounds, *remote)
            self._pending = PendingWrite(ids, block, written)

    def settle(self) -> None:
        """Wait until all states are on disk; raises `UnwrittenRows` if they cannot."""
        with self._lock:
            if self._pending:
                with writing():  # again for whoever asks next, as for a checkpoint
                    self._pending.written.result()
                self._pending = None

    @writing()
    def flush(self, round: int) -> None:
        """Flush to disk and protect the states, so that `round` can be checkpointed."""
        self.settle()
        self._rows.sync()
        self._file.flush()
        self._protected = (*self._protected, round)[-PROTECTED:]
        if self._log:
            self._log.add(round, self._logged_between)
        if self._is_kept:
            path = self._folder / CHECKSUMS
            earlier = sorted(r for r in read_checksums(path).items() if r[0] < round)
            last = round, int(self._checksum)
            write_checksums(path, dict([*earlier[-PROTECTED:], last]))

    def keep_newest(self) -> None:
        """Free all versions but the newest, at the end of a stage.

        The stage can be resumed from its last checkpoint only. After a kill at any
        moment its rows are whole, and the next call frees the rest.
        """
        self.settle()
        if self._is_kept:
            last = {self._protected[-1]: int(self._checksum)}
            write_checksums(self._folder / CHECKSUMS, last)
        for start in self._written_blocks():
            part = self._stamps[start : start + BLOCK]
            is_old = (part > 0) & (part < part.max(axis=1, keepdims=True))
            if self._is_kept:  # one process is enough, as all have written theirs
                self._rows.drop(start * VERSIONS + np.flatnonzero(is_old))
            part[is_old] = 0

    def touched(self) -> np.ndarray:
        """Ids of clients with a state, ascending, [n] int64."""
        self.settle()
        return self._newest_between(0, np.iinfo(np.int32).max)[0]

    def newest(self) -> int:
        """1 + the last round that wrote a state; 0 if there is none."""
        return int(self._stamps[self.touched()].max(initial=0))

    def _check_size(self, path: pathlib.Path, size: int) -> None:
        found = path.stat().st_size if path.exists() else 0
        if found != size:
            got = f"{path.name} of {found} bytes, not {size}"
            raise lost_states(self._folder, got)

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        self._rows.lock(kind)
        try:
            yield
        finally:
            self._rows.lock(fcntl.LOCK_UN)

    def _written_blocks(self) -> Iterable[int]:
        """Yield the first clients of the chunks that may have stamps."""
        if not self._is_kept:  # this process' own stamps are in no file
            return range(0, self.population, BLOCK)
        self._file.flush()  # until then a page may look like a hole
        numbers = written_blocks(self._folder / "stamps.bin", VERSIONS * 4 * BLOCK)
        return (number * BLOCK for number in numbers)

    def _newest_between(self, since: int, until: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids [n] whose newest stamp up to `until` is above `since`, and the stamps."""
        ids, stamps = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
        for start in self._written_blocks():
            part = self._stamps[start : start + BLOCK]
            newest = np.where(part <= until, part, 0).max(axis=1)
            rows = np.flatnonzero(newest > since)
            ids.append(start + rows)
            stamps.append(newest[rows])
        return np.concatenate(ids), np.concatenate(stamps)

    def _logged_between(self, since: int, until: int) -> tuple[np.ndarray, ...]:
        """`_newest_between`, and the processes [n] that have the rows."""
        ids, stamps = self._newest_between(since, until)
        return ids, stamps, self._owners_of(ids, stamps)

    def _write(self, ids, block, rounds, remote_ids, remote_owners) -> None:
        """Write the states first, then the stamps that make them valid."""
        all_ids = np.concatenate([ids, remote_ids])
        try:
            old_stamps = self._stamps.take(all_ids, axis=0).max(axis=1)
            places, new_stamps = self._free_places(all_ids, rounds), rounds + 1
            self._stamps.put(places, 0)
            if self._exchange:
                here = np.full(len(ids), self._exchange.process, np.uint16)
                self._owners.put(places, np.concatenate([here, remote_owners]))
            keys = checksum_keys(all_ids, new_stamps)
            if self._leaves:
                block[:, -SUM_BYTES:] = _sums(block, keys[: len(ids)])
                self._rows.write(block, places[: len(ids)])
            self._stamps.put(places, new_stamps)
            change = keys - checksum_keys(all_ids, old_stamps)
            self._checksum = np.append(change, self._checksum).sum()
        finally:
            self._rows.lock(fcntl.LOCK_UN)

    def _logged(self, ids: np.ndarray, stamps: np.ndarray) -> np.ndarray:
        """States of clients `ids` [n] with these stamps [n], bytes [n, row bytes]."""
        block = np.zeros((len(ids), self._row_bytes), np.uint8)
        self._read(block, ids, stamps)
        return block

    def _read(self, rows: Rows, ids: np.ndarray, stamps: np.ndarray) -> None:
        """Read the states of clients `ids` [n] with these stamps [n] into `rows`."""
        versions = self._versions_of(ids, stamps)
        keys = checksum_keys(ids, stamps)
        is_whole = self._rows.read(rows, ids * VERSIONS + versions, keys)
        if not is_whole.all():
            client = ids[is_whole.argmin()]
            got = f"another row of client {client} in rows.bin"
            raise lost_states(self._folder, got)

    def _free_places(self, ids, rounds) -> np.ndarray:
        """Where to write, [K]: this round's version, else the oldest unprotected."""
        stamps = self._stamps.take(ids, axis=0)
        age, first = stamps.copy(), VERSIONS * np.arange(len(ids))
        for past in self._protected:
            needed = np.where(stamps <= past, stamps, 0).argmax(axis=1)
            age.put(first + needed, np.iinfo(np.int32).max)
        np.putmask(age, stamps == rounds[:, None] + 1, -1)
        return VERSIONS * ids + age.argmin(axis=1)


def restore_rows(folder: pathlib.Path, process: int = 0, count: int = 1) -> None:
    """Restore a store from its log: all stamps, and the rows of a process.

    Args:
      process, count: number of the process among those that have rows.
    """
    logged = [read_ids(path) for path in log_files(folder)]
    for name in ("rows.bin", "stamps.bin", OWNERS):
        (folder / name).unlink(missing_ok=True)
    if not logged:
        return
    population, size = logged[0].population, logged[0].row_bytes
    num_places = population * VERSIONS
    if {(file.population, file.row_bytes) for file in logged} != {(population, size)}:
        raise ValueError(f"{folder} must have a log of one population, got several.")
    numbers = [np.unique(x.processes[x.processes % count == process]) for x in logged]
    parts = [*zip(logged, map(np.ndarray.tolist, numbers), strict=True)]
    for file, own in parts:
        for number in own:
            file.check(number)
    check_bytes(4 * num_places, f"{folder}: stamps", shutil.disk_usage(folder).free)
    # A store without rows has one byte for each, and a checksum.
    rows = StateFile(folder / "rows.bin", num_places, size or 1 + SUM_BYTES)
    stamps = _numbers(folder / "stamps.bin", num_places, np.int32)
    owners = _numbers(folder / OWNERS, num_places, np.uint16)
    for file, own in parts:  # the oldest first: the newest versions stay
        of_clients = stamps.reshape(population, VERSIONS)[file.ids]
        places = VERSIONS * file.ids + of_clients.argmin(axis=1)
        for number in own:
            for here, block in file.blocks(number):
                rows.write(block, places[here])
        stamps[places], owners[places] = file.stamps, file.processes % count
    stamps.flush()


def _numbers(path: pathlib.Path, count: int, dtype: type) -> np.memmap:
    """A file of `count` zeros, with disk space, that can be changed."""
    allocate(path, count * np.dtype(dtype).itemsize)
    return np.memmap(path, dtype, "r+", shape=count)
