"""Client-state store: the personal states of all N clients, on disk.

A row is one client's flattened personal tree. Each client has three places for it in a
sparse file, `rows.bin`, and a stamp for each in `stamps.bin` (1 + the round that wrote
it, 0 for none). A write never touches what the last two checkpoints see, so a run that
is killed at any moment and resumed at either, at round R, reads exactly the rows of
round R: later stamps do not count. Nothing is written until a client takes part, and
memory does not grow with N. When a stage has ended, `keep_newest` frees all versions
but the newest. Where a row is empty, a client has one stamp, of its first round.

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
"""

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import pathlib
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from fedfr_jax import trees
from fedfr_jax.federated.row_log import RowLog, log_files, read_rows
from fedfr_jax.files import check_bytes, write_text
from fedfr_jax.types import PyTree

FILL_BYTES = 2**20  # zeros that are written at a time
BLOCK = 2**12  # clients whose stamps are searched together


def checksum_keys(ids: np.ndarray, stamps: np.ndarray) -> np.ndarray:
    """Hash [n] uint64 of every client and stamp; 0 if there is no stamp."""
    mixed = ids.astype(np.uint64) << np.uint64(32) | stamps.astype(np.uint64)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # as in SplitMix64
        mixed = (mixed ^ mixed >> np.uint64(31)) * np.uint64(factor)
    return np.where(stamps > 0, mixed, np.uint64(0))


def drop_after(
    stamps: np.ndarray, round: int, starts: Iterable[int] | None = None
) -> np.uint64:
    """Remove stamps [N, versions] after `round`; return the others' checksum.

    Args:
      starts: of the blocks of clients that may have stamps; None is all blocks.
    """
    checksum = np.zeros(1, np.uint64)  # arrays wrap around without a warning
    for start in range(0, len(stamps), BLOCK) if starts is None else starts:
        part = stamps[start : start + BLOCK]
        late = part > round
        if late.any():
            part[late] = 0
        if part.any():
            ids = np.arange(start, start + len(part))
            checksum += checksum_keys(ids, part.max(axis=1)).sum()
    return checksum[0]


def update_checksums(
    checksum: np.uint64, ids: np.ndarray, old_stamps: np.ndarray, new_stamps: np.ndarray
):
    """Update the store's checksum when the newest stamps of `ids` change."""
    change = checksum_keys(ids, new_stamps) - checksum_keys(ids, old_stamps)
    return np.append(change, checksum).sum()


def read_checksums(path: pathlib.Path) -> dict[int, np.uint64]:
    """Read {round: checksum}; {} if the file is missing or damaged."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        pairs = map(str.split, lines)
        return {int(round): np.uint64(int(checksum)) for round, checksum in pairs}
    except (FileNotFoundError, ValueError, OverflowError):
        return {}


def write_checksums(path: pathlib.Path, checksums: dict[int, np.uint64]) -> None:
    """Write the checksums atomically, to disk."""
    lines = (f"{round} {checksum}\n" for round, checksum in checksums.items())
    write_text(path, "".join(lines))


FORMAT = "rows with checksums"  # the first line of layout.txt


def check_layout(path: pathlib.Path, template: PyTree, population: int) -> None:
    """Write the layout of the client states, or raise ValueError if it differs."""
    lines = [FORMAT, f"population {population}"] + [
        f"{trees.path_name(p)} {tuple(x.shape)} {np.dtype(x.dtype)}"
        for p, x in jax.tree_util.tree_leaves_with_path(template)
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


def check_sizes(folder: pathlib.Path, **sizes: int) -> None:
    """Raise ValueError unless `folder` has `name.bin` of the size for each name."""
    for name, size in sizes.items():
        path = folder / f"{name}.bin"
        actual_size = path.stat().st_size if path.exists() else 0
        if actual_size != size:
            raise lost_states(folder, f"{path.name} of {actual_size} bytes, not {size}")


def lost_states(folder: pathlib.Path, got: str) -> ValueError:
    """Build the error for lost client states, with what to do."""
    return ValueError(
        f"{folder} must hold the personal rows as written, got {got}. Rows are lost: "
        f"rerun with --overwrite={folder.parent.name} to retrain that stage; earlier "
        "stages are kept."
    )


def open_stamps(
    path: pathlib.Path,
    population: int,
    versions: int,
    is_kept: bool,
    is_read_only: bool,
) -> np.memmap:
    """Open [N, versions] int32 stamps, allocated fully so that a full disk fails here.

    Changes go to the file if they are to be kept, else to this process' memory; a file
    that is read only must be there.
    """
    size = population * versions * 4
    if not is_read_only:
        with open(path, "a+b") as file:
            if os.path.getsize(path) != size:
                _allocate(file, size)
    mode = "r+" if is_kept else "c"
    return np.memmap(path, np.int32, mode, shape=(population, versions))


def _allocate(file, size: int) -> None:
    """Extend a file to `size` bytes, with disk space allocated."""
    old_size = os.fstat(file.fileno()).st_size
    if hasattr(os, "posix_fallocate"):
        file.truncate(size)
        os.posix_fallocate(file.fileno(), 0, size)
        return
    file.truncate(min(old_size, size))
    for start in range(old_size, size, FILL_BYTES):
        file.write(bytes(min(FILL_BYTES, size - start)))


def written_blocks(path: pathlib.Path, row_bytes: int, block: int) -> Iterator[int]:
    """Yield the first row of each chunk of `block` rows with data in a sparse file.

    A file system that knows no holes has data everywhere.
    """
    size, start, step = os.path.getsize(path), 0, block * row_bytes
    with open(path, "rb") as file:
        while start < size:
            try:
                start = os.lseek(file.fileno(), start, os.SEEK_DATA)
            except OSError:  # nothing from here on
                return
            place = start // step
            yield place * block
            start = (place + 1) * step


SUM_BYTES = 4
KEEP_SIZE, PUNCH_HOLE = 1, 2  # of Linux's fallocate


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
        if is_read_only:
            return
        if os.fstat(self._file).st_size != num_places * row_bytes:
            os.ftruncate(self._file, num_places * row_bytes)

    def read(
        self, block: np.ndarray, rows: np.ndarray, places: np.ndarray, keys: np.ndarray
    ) -> np.ndarray:
        """Read `rows` [n] of `block` [K, row bytes] uint8 from `places` [n].

        Returns:
          [n] bool, whether each is there as it was written with its key of `keys` [n].
        """

        def read_part(part, start):
            return os.preadv(self._file, [part], start)

        is_whole = [
            _move_all(read_part, block[row], place * self.row_bytes)
            for row, place in zip(rows.tolist(), places.tolist(), strict=True)
        ]
        sums = _sums((block[row] for row in rows.tolist()), keys)
        is_whole = np.array(is_whole, bool)
        return is_whole & (block[rows, -SUM_BYTES:] == sums).all(axis=1)

    def write(self, block: np.ndarray, places: np.ndarray, keys: np.ndarray) -> None:
        """Write `block` [n, row bytes], with the checksums in its last bytes."""
        block[:, -SUM_BYTES:] = _sums(block, keys)
        self.put(block, places)

    def put(self, block: np.ndarray, places: np.ndarray) -> None:
        """Write `block` [n, row bytes], checksums included, as it is."""

        def write_part(part, start):
            return os.pwrite(self._file, part, start)

        for row, place in zip(block, places.tolist(), strict=True):
            if not _move_all(write_part, row, place * self.row_bytes):
                raise OSError(f"{self.path}: row {place} was only written in part.")

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
        os.fsync(self._file)

    def share(self) -> None:
        """Take a shared lock on the file, until `free`."""
        self._lock(fcntl.LOCK_SH)

    def free(self) -> None:
        """Release the lock of `share`."""
        self._lock(fcntl.LOCK_UN)

    @contextlib.contextmanager
    def exclusive(self):
        """Context with an exclusive lock on the file."""
        self._lock(fcntl.LOCK_EX)
        try:
            yield
        finally:
            self.free()

    def _lock(self, kind) -> None:
        """Lock the file, unless it is read-only."""
        if not self._is_read_only:
            fcntl.flock(self._file, kind)


def _sums(rows, keys):
    """CRC-32 [n, 4] uint8 of each row without its checksum, seeded with its key."""
    starts = (keys & np.uint64(0xFFFFFFFF)).tolist()
    sums = [
        zlib.crc32(row[:-SUM_BYTES], start)
        for row, start in zip(rows, starts, strict=True)
    ]
    return np.array(sums, "<u4").view(np.uint8).reshape(-1, SUM_BYTES)


def _move_all(move: Callable, row: np.ndarray, start: int) -> bool:
    """Read or write a row by `move(part, start) -> bytes moved`; True if it is whole.

    A call of the operating system moves at most 2 GiB.
    """
    done = 0
    while done < len(row) and (count := move(row[done:], start + done)):
        done += count
    return done == len(row)


def pack(rows: PyTree, count: int, row_bytes: int) -> np.ndarray:
    """Pack `rows` [count, ...] to bytes [count, row_bytes], a checksum included."""
    parts = [
        np.ascontiguousarray(np.asarray(leaf)).reshape(count, -1).view(np.uint8)
        for leaf in jax.tree.leaves(rows)
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


def unpack(block: np.ndarray, leaves: Sequence) -> list[np.ndarray]:
    """Unpack arrays [K, ...] like `leaves` from rows [K, row bytes] uint8."""
    arrays, start = [], 0
    for leaf in leaves:
        size = trees.num_bytes(leaf)
        part = block[:, start : start + size].view(leaf.dtype)
        arrays.append(part.reshape(len(block), *leaf.shape))
        start += size
    return arrays


PROTECTED = 2  # checkpoints whose rows are never overwritten
VERSIONS = PROTECTED + 1
CHECKSUMS = "seals.txt"


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
      is_mirrored: the folder is copied elsewhere with every checkpoint; no other
        process uses it, it has the rows of all clients, and a log of them.

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
        is_mirrored=False,
    ):
        if folder is None and sharer is not None:
            raise ValueError(
                "a store needs a folder that all processes can access, got None."
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
        self._rows = StateFile(path, num_places, self._row_bytes, is_read_only)
        self._is_shared = sharer is not None
        self._is_kept = not (sharer or is_read_only)
        with self._rows.exclusive():  # an earlier store may still be writing
            path = self._folder / "stamps.bin"
            self._file = open_stamps(
                path, population, VERSIONS, self._is_kept, is_read_only
            )
            self._stamps = np.asarray(self._file)  # indexed faster than a memmap
            self._checksum = drop_after(
                self._stamps, resume_round, self._written_blocks()
            )
            checksums = read_checksums(self._folder / CHECKSUMS)
            if is_resumed and checksums.get(resume_round) != self._checksum:
                got = f"stamps of another round than {resume_round} in {CHECKSUMS}"
                raise lost_states(self._folder, got)
        # From here on only the pages of a cohort are read, without read-ahead.
        pages: Any = self._file.base
        pages.madvise(mmap.MADV_RANDOM)
        self._protected = tuple(sorted({*protected, resume_round}))[-PROTECTED:]
        self._writer = ThreadPoolExecutor(1, "store")
        self._pending = None
        self.is_mirrored, self._log = is_mirrored, None
        if is_mirrored and not is_read_only:
            size = self._row_bytes if self._leaves else 0
            self._log = RowLog(self._folder, population, size, self._logged)
            self._log.forget_after(resume_round)

    @property
    def template(self) -> PyTree:
        """Pytree of one client's state, as arrays or ShapeDtypeStructs."""
        return jax.tree.unflatten(self._treedef, self._leaves)

    def gather(self, ids: np.ndarray) -> tuple[PyTree, np.ndarray]:
        """Load the states of clients `ids` [K]: tree of [K, ...], and `is_new` [K].

        A new client's row, and that of a negative id, is zero.
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
            is_pending = pending.ids[place] == ids
            block[is_pending] = pending.block[place[is_pending]]
            is_new, on_disk = is_new & ~is_pending, on_disk & ~is_pending
        if self._is_shared and not pending:  # a lock makes NFS drop cached pages
            self._rows.share()
            self._rows.free()
        rows = np.flatnonzero(on_disk)
        self._read(block, rows, ids[rows], newest[rows], stamps[rows])
        leaves = unpack(block, self._leaves)
        return jax.tree.unflatten(self._treedef, leaves), is_new

    def scatter(
        self, ids: np.ndarray, rows: PyTree, round: int | np.ndarray, remote_ids=()
    ) -> None:
        """Write states `rows`, a tree of [K, ...], of `round` in the background.

        Negative ids are skipped; the arrays must not change afterwards. Other processes
        write this round's rows of the clients `remote_ids`.

        Raises:
          ValueError: when the rows are longer or shorter than the store's.
          OSError: when the rows before these could not be written, for instance to a
            full disk; the versions before that round stay whole.
        """
        self.settle()
        remote_ids = np.asarray(remote_ids, np.int64)
        remote_ids = remote_ids[remote_ids >= 0]
        block = pack(rows, len(ids), self._row_bytes)
        ids, rounds = ids.astype(np.int64), np.broadcast_to(round, len(ids))
        if (ids[:1] < 0).any() or (ids[1:] <= ids[:-1]).any():
            order = ids.argsort()[np.count_nonzero(ids < 0) :]
            ids, block, rounds = ids[order], block[order], rounds[order]
        if len(remote_ids):
            rounds = np.full(len(ids) + len(remote_ids), round)
        if not self._leaves:  # only that a client took part is stored
            return self._mark(np.concatenate([ids, remote_ids]), rounds)
        self._rows.share()  # other processes may write theirs
        written = self._writer.submit(self._write, ids, block, rounds, remote_ids)
        self._pending = PendingWrite(ids, block, written)

    def settle(self) -> None:
        """Wait until all states are on disk; raises the writer's OSError."""
        pending, self._pending = self._pending, None
        if pending:
            pending.written.result()

    def flush(self, round: int) -> None:
        """Flush to disk and protect the states, so that `round` can be checkpointed."""
        self.settle()
        self._rows.sync()
        self._file.flush()
        self._protected = (*self._protected, round)[-PROTECTED:]
        if self._log:
            self._log.add(round, self._newest_between)
        if self._is_kept:
            path = self._folder / CHECKSUMS
            earlier = sorted(r for r in read_checksums(path).items() if r[0] < round)
            checksums = dict([*earlier[-PROTECTED:], (round, self._checksum)])
            write_checksums(path, checksums)

    def keep_newest(self) -> None:
        """Free all versions but the newest, at the end of a stage.

        The stage can be resumed from its last checkpoint only. After a kill at any
        moment its rows are whole, and the next call frees the rest.
        """
        self.settle()
        if not self._leaves:
            return
        if self._is_kept:
            write_checksums(
                self._folder / CHECKSUMS, {self._protected[-1]: self._checksum}
            )
        for start in self._written_blocks():
            part = self._stamps[start : start + BLOCK]
            is_old = (part > 0) & (part < part.max(axis=1, keepdims=True))
            if self._is_kept:  # one process is enough, as all have written theirs
                self._rows.drop(start * VERSIONS + np.flatnonzero(is_old))
            part[is_old] = 0

    def touched(self) -> np.ndarray:
        """Ids of clients with a state, ascending, [n] int64."""
        self.settle()
        ids = [np.zeros(0, np.int64)]
        for start in self._written_blocks():
            part = self._stamps[start : start + BLOCK]
            ids.append(start + np.flatnonzero(part.any(axis=1)))
        return np.concatenate(ids)

    def newest(self) -> int:
        """1 + the last round that wrote a state; 0 if there is none."""
        return int(self._stamps[self.touched()].max(initial=0))

    def _written_blocks(self):
        """Yield the first clients of the chunks that may have stamps."""
        if not self._is_kept:  # this process' own stamps are in no file
            return range(0, self.population, BLOCK)
        self._file.flush()  # until then a page may look like a hole
        path = self._folder / "stamps.bin"
        return written_blocks(path, VERSIONS * 4, BLOCK)

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

    def _logged(self, ids: np.ndarray, stamps: np.ndarray) -> np.ndarray:
        """States of clients `ids` [n] with these stamps [n], bytes [n, row bytes]."""
        block = np.zeros((len(ids), self._row_bytes), np.uint8)
        versions = (self._stamps[ids] == stamps[:, None]).argmax(axis=1)
        self._read(block, np.arange(len(ids)), ids, versions, stamps)
        return block

    def _is_new(self, ids) -> np.ndarray:
        """Mask of the clients `ids` [K] without a state."""
        stamps = self._stamps.take(np.maximum(ids, 0), axis=0)
        return ~stamps.any(axis=1) | (ids < 0)

    def _mark(self, ids, rounds) -> None:
        """Stamp those of `ids` that have no stamp yet."""
        is_new = self._is_new(ids)
        ids, rounds = ids[is_new], rounds[is_new]
        old_stamps, self._stamps[ids, 0] = self._stamps[ids, 0], rounds + 1
        self._checksum = update_checksums(
            self._checksum, ids, old_stamps, self._stamps[ids, 0]
        )

    def _unwritten(self) -> PendingWrite | None:
        """The pending write, or None if all rows are on disk; raises its error."""
        if self._pending and self._pending.written.done():
            self.settle()
        return self._pending

    def _write(self, ids, block, rounds, remote_ids) -> None:
        """Write the states first, then the stamps that make them valid."""
        all_ids = np.concatenate([ids, remote_ids])
        try:
            old_stamps = self._stamps.take(all_ids, axis=0).max(axis=1)
            places, new_stamps = self._free_places(all_ids, rounds), rounds + 1
            self._stamps.put(places, 0)
            keys = checksum_keys(all_ids, new_stamps)
            self._rows.write(block, places[: len(ids)], keys[: len(ids)])
            self._stamps.put(places, new_stamps)
            self._checksum = update_checksums(
                self._checksum, all_ids, old_stamps, new_stamps
            )
        finally:
            self._rows.free()

    def _read(self, block, rows, ids, versions, stamps) -> None:
        """Read `rows` of `block` from the `versions` of clients `ids`."""
        keys = checksum_keys(ids, stamps)
        is_whole = self._rows.read(block, rows, ids * VERSIONS + versions, keys)
        if not is_whole.all():
            client = ids[is_whole.argmin()]
            raise lost_states(
                self._folder, f"another row of client {client} in rows.bin"
            )

    def _free_places(self, ids, rounds) -> np.ndarray:
        """Where to write, [K]: this round's version, else the oldest unprotected."""
        stamps = self._stamps.take(ids, axis=0)
        age, first = stamps.copy(), VERSIONS * np.arange(len(ids))
        for past in self._protected:
            needed = np.where(stamps <= past, stamps, 0).argmax(axis=1)
            age.put(first + needed, np.iinfo(np.int32).max)
        np.putmask(age, stamps == rounds[:, None] + 1, -1)
        return VERSIONS * ids + age.argmin(axis=1)


def restore_rows(folder: pathlib.Path) -> None:
    """Restore rows.bin and stamps.bin of a store from its log."""
    logged = [read_rows(path) for path in log_files(folder)]
    for name in ("rows.bin", "stamps.bin"):
        (folder / name).unlink(missing_ok=True)
    if not logged:
        return
    population, size = logged[0].population, logged[0].row_bytes
    num_places = population * VERSIONS
    if {(file.population, file.row_bytes) for file in logged} != {(population, size)}:
        raise ValueError(f"{folder} must have a log of one population, got several.")
    check_bytes(4 * num_places, f"{folder}: stamps", shutil.disk_usage(folder).free)
    # A store without rows has one byte for each, and a checksum.
    rows = StateFile(folder / "rows.bin", num_places, size or 1 + SUM_BYTES)
    stamps = open_stamps(folder / "stamps.bin", population, VERSIONS, True, False)
    for file in logged:  # the oldest first: the newest versions stay
        places = VERSIONS * file.ids + stamps[file.ids].argmin(axis=1)
        for part, block in file.blocks():
            rows.put(block, places[part])
        stamps.reshape(-1)[places] = file.stamps
    stamps.flush()
