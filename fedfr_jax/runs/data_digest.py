"""Data digest of a stage: which images were used, and for what.

A stage's folder holds `data.npz`: name, identity, size and checksum of every image that
the run uses, whether it is for training or for a test, its client and its class; some
8 MB for a million images. It is compared when the stage is resumed, evaluated, opened
or reused, so that changed data are not taken for those that it was trained on. The
data's path is not part of it.
"""

import pathlib
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax.data.sources.npz import DAMAGED
from fedfr_jax.data.sources.stored import get_stored
from fedfr_jax.files import read_npz, replace_file
from fedfr_jax.runs.checkpoint import is_trained
from fedfr_jax.types import DataUsage, Source, Task, UsedRows

FILE = "data.npz"
ACCEPT = "accept"  # value of --data-changed
MAX_NAMES = 3  # images of each change that a message names
END = "\0"  # which no file name contains


class Digest(NamedTuple):
    """Names, identities, checksums and uses of n images."""

    names: list[str]  # n, each once
    identities: np.ndarray  # [n] str
    sizes: np.ndarray  # [n] int64 bytes
    checksums: np.ndarray  # [n] uint32, 0: not known
    uses: np.ndarray  # [n] str, such as "train"
    clients: np.ndarray  # [n] int32, -1: no client's
    numbers: np.ndarray  # [n] int32 class or camera, -1: none


def digest_of(used: DataUsage) -> Digest:
    """Compute the digest of the images that are used."""
    source, parts = used
    use, client, number = np.full((3, len(source.labels)), -1, np.int32)
    for index, part in enumerate(parts.values()):
        use[part.rows] = index
        if part.client is not None:
            client[part.rows] = part.client
        if part.number is not None:
            number[part.rows] = part.number
    rows = np.flatnonzero(use >= 0)
    stored = get_stored(source)
    sizes, checksums = stored.facts(rows)
    return Digest(
        names=_make_unique([stored.names[row] for row in rows]),
        identities=np.array(source.names, str)[source.labels[rows]],
        sizes=sizes,
        checksums=checksums,
        uses=np.array([*parts], str)[use[rows]],
        clients=client[rows],
        numbers=number[rows],
    )


def digest_source(source: Source) -> Digest:
    """Compute the digest of all images of a source."""
    used = UsedRows(np.arange(len(source.labels)))
    return digest_of(DataUsage(source, {"image": used}))


def _make_unique(names: list[str]) -> list[str]:
    """Make names unique: a repeated image (as in ratings) becomes "<name> #2"."""
    if len({*names}) == len(names):
        return names
    counts, unique = {}, []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        unique.append(name if counts[name] == 1 else f"{name} #{counts[name]}")
    return unique


def write(digest: Digest, path: pathlib.Path) -> None:
    """Write a digest to a file; repeated strings are stored as codes."""
    arrays = {}
    for key, values in digest._asdict().items():
        if key == "names":
            values = _join(values)
        elif values.dtype.kind == "U":
            distinct, values = np.unique(values, return_inverse=True)
            arrays[f"{key}_words"] = _join(distinct.tolist())
            values = values.astype(np.int32)
        arrays[key] = values
    with replace_file(path) as file:
        np.savez_compressed(file, **arrays)


def read(path: pathlib.Path) -> Digest:
    """Read a digest from a file."""
    try:
        columns = read_npz(path)
        for key in ("identities", "uses"):
            distinct = np.array(_split(columns.pop(f"{key}_words")), str)
            columns[key] = distinct[columns[key]]
        digest = Digest(names=_split(columns.pop("names")), **columns)
        if len(lengths := {len(values) for values in digest}) > 1:
            raise ValueError(f"columns must have one length, got {lengths}")
        return digest
    except (*DAMAGED, TypeError, IndexError) as error:
        raise ValueError(
            f"{path} must be an undamaged digest, got a damaged file "
            f"({type(error).__name__}). Restore a copy, or delete it and use "
            f"--data-changed={ACCEPT}."
        ) from error


def _join(strings):
    text = "".join(f"{string}{END}" for string in strings)
    return np.frombuffer(text.encode(), np.uint8)


def _split(data):
    return data.tobytes().decode().split(END)[:-1]


def difference(stored: Digest, now: Digest) -> str:
    """Describe the changes between two digests, by count and names; "": equal."""
    lists = {}
    old = new = np.arange(len(stored.names))
    if stored.names != now.names:
        row_of_name = {name: row for row, name in enumerate(now.names)}
        before = {*stored.names}
        lists["added"] = [name for name in now.names if name not in before]
        lists["gone"] = [name for name in stored.names if name not in row_of_name]
        is_common = [name in row_of_name for name in stored.names]
        old = np.flatnonzero(is_common)
        new = np.array([row_of_name[stored.names[row]] for row in old], int)
    for change, is_changed, describe in _changes(stored, now, old, new):
        lists[change] = [
            f"{stored.names[i]}: {describe(stored, i)}, now {describe(now, j)}"
            for i, j in zip(old[is_changed], new[is_changed], strict=True)
        ]
    parts = [f"{len(x)} {change} ({_first(x)})" for change, x in lists.items() if x]
    return "; ".join(parts)


def _changes(stored, now, old, new) -> Iterator:
    """Yield (change, mask [m], (digest, row) -> text) of images `old`, now `new`."""
    is_relabeled = stored.identities[old] != now.identities[new]
    yield "relabeled", is_relabeled, lambda digest, row: digest.identities[row]
    sums = stored.checksums[old], now.checksums[new]
    is_known = (sums[0] != 0) & (sums[1] != 0)
    has_other_size = stored.sizes[old] != now.sizes[new]
    is_other = has_other_size | (is_known & (sums[0] != sums[1]))
    yield "with other contents", is_other, _describe_contents
    columns = [(x.uses, x.clients, x.numbers) for x in (stored, now)]
    pairs = zip(*columns, strict=True)
    is_moved = np.any([a[old] != b[new] for a, b in pairs], axis=0)
    yield "with another use", is_moved, _describe_use


def _describe_contents(digest, row):
    return f"{digest.sizes[row]} bytes, checksum {digest.checksums[row]:08x}"


def _describe_use(digest, row):
    client, number = digest.clients[row], digest.numbers[row]
    text = digest.uses[row]
    text += f" of client {client}" if client >= 0 else ""
    return text + (f" as number {number}" if number >= 0 else "")


def _first(names):
    more = ", ..." if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def digest_task(task: Task) -> Digest | None:
    """Digest of a task's images, or of its rows and labels if images have no names.

    None for a task without labels, and for what is no `Task`.
    """
    if not isinstance(task, Task):
        return None
    if task.used is not None:
        return digest_of(task.used)
    targets = {} if task.dataset is None else task.dataset.targets
    if "label" not in targets or np.ndim(targets["label"]) != 1:
        return None
    names, labels = np.unique(targets["label"], return_inverse=True)
    source = Source(None, labels, tuple(map(str, names)), ())
    offsets = np.asarray(task.population.offsets)
    client = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    used = UsedRows(np.arange(len(client)), client)
    return digest_of(DataUsage(source, {"train": used}))


def record(task: Task, folders: Collection[pathlib.Path]) -> None:
    """Write the digest for stages without a checkpoint, in the first process."""
    fresh = [folder for folder in folders if not is_trained(folder)]
    if fresh and meshes.is_first_process() and (now := digest_task(task)):
        for folder in fresh:
            write(now, folder / FILE)


def check(
    task: Task,
    folders: Collection[pathlib.Path],
    *,
    changed: str | None = None,
    is_kept: bool = False,
) -> None:
    """Compare the data with those that the stages were trained on.

    Args:
      task: with the images of today.
      folders: of stages; those without a checkpoint do not count.
      changed: ACCEPT prints the changes instead of raising.
      is_kept: whether accepted changes are recorded, for stages that train on.
    """
    trained = [folder for folder in folders if is_trained(folder)]
    now = digest_task(task) if trained else None
    if now is None:
        return
    for folder in trained:
        path = folder / FILE
        has_changed = compare(path, now, changed) if path.exists() else True
        if not path.exists():
            _check_unrecorded(task, path, changed)
        if has_changed and is_kept:
            write(now, path)


def _check_unrecorded(task, path, changed):
    """Raise ValueError for a stage without a digest whose test images may have changed.

    It was trained by a version that sampled test images in another way.
    """
    source = task.used.source if task.used else None
    is_sampled = source is not None and source.roles is None  # else its files say it
    if is_sampled and get_stored(source).is_named and changed != ACCEPT:
        raise ValueError(
            f"{path} must exist to compare the data, but does not, as in runs of an "
            "earlier version, which chose other test images: the current ones may have "
            "been trained on. Train in another --workdir, or use the data as they are "
            f"with --data-changed={ACCEPT}."
        )
    print(f"{path} is missing: the data cannot be compared.", flush=True)


def data_check(
    task: Task, changed: str | None
) -> Callable[[Collection[pathlib.Path]], None]:
    """Build `check_data` of `workdir.claim`, which records accepted changes."""
    return lambda folders: check(task, folders, changed=changed, is_kept=True)


def compare(path: pathlib.Path, now: Digest, changed: str | None) -> bool:
    """Whether data differ from a stored digest; raises ValueError unless accepted."""
    changes = difference(read(path), now)
    if changes and changed != ACCEPT:
        raise ValueError(
            f"{path.parent} must be used with the data that it was trained on, but "
            f"these have changed: {changes}. Restore them, train in another --workdir, "
            f"or use them as they are with --data-changed={ACCEPT}."
        )
    if changes:
        print(f"{path.parent}: its data have changed: {changes}.", flush=True)
    return bool(changes)
