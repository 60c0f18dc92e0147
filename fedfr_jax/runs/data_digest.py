"""Data digest of a stage: which images were used, and for what.

A stage's folder holds `data.npz`: of every image that the run uses its name, identity,
bytes and checksum, and whether it is for training or for a test, of which client and as
which class; some 8 MB for a million images. It is compared when the stage is resumed,
evaluated, opened or reused, so that data that have changed are not taken for those that
it was trained on. Where the data lie is no part of it.
"""

import pathlib
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax.data.sources.npz import DAMAGED
from fedfr_jax.data.sources.stored import get_stored
from fedfr_jax.files import replace_file
from fedfr_jax.runs.stage_folders import is_trained
from fedfr_jax.types import DataUsage, Source, Task, UsedRows

FILE = "data.npz"
ACCEPT = "accept"  # of --data-changed
MAX_NAMES = 3  # images of each change that a message names
END = "\0"  # no name of a file has it


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
    place = np.full((3, len(source.labels)), -1, np.int32)
    for number, part in enumerate(parts.values()):
        for row, values in enumerate((number, part.client, part.number)):
            if values is not None:
                place[row, part.rows] = values
    rows = np.flatnonzero(place[0] >= 0)
    stored = get_stored(source)
    use, client, number = place[:, rows]
    sizes, checksums = stored.facts(rows)
    return Digest(
        names=_each_once([stored.names[row] for row in rows]),
        identities=np.array(source.names, str)[source.labels[rows]],
        sizes=sizes,
        checksums=checksums,
        uses=np.array([*parts], str)[use],
        clients=client,
        numbers=number,
    )


def digest_source(source: Source) -> Digest:
    """Compute the digest of all images of a source."""
    return digest_of(
        DataUsage(source, {"image": UsedRows(np.arange(len(source.labels)))})
    )


def _each_once(names: list[str]) -> list[str]:
    """Make names unique: a repeated image (as in ratings) is called <name> #2."""
    if len({*names}) == len(names):
        return names
    seen, found = {}, []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return found


def write(digest: Digest, path: pathlib.Path) -> None:
    """Write a digest to a file; repeated strings are stored as codes."""
    arrays = {}
    for key, values in digest._asdict().items():
        if key == "names":
            values = _bytes_of(values)
        elif values.dtype.kind == "U":
            words, values = np.unique(values, return_inverse=True)
            arrays[f"{key}_words"] = _bytes_of(words.tolist())
            values = values.astype(np.int32)
        arrays[key] = values
    with replace_file(path) as file:
        np.savez_compressed(file, **arrays)


def read(path: pathlib.Path) -> Digest:
    """Read a digest from a file."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = {key: arrays[key] for key in arrays.files}
        for key in ("identities", "uses"):
            words = np.array(_describe(found.pop(f"{key}_words")), str)
            found[key] = words[found[key]]
        digest = Digest(names=_describe(found.pop("names")), **found)
        if len(lengths := {len(values) for values in digest}) > 1:
            raise ValueError(f"columns must have one length, got {lengths}")
        return digest
    except (*DAMAGED, TypeError, IndexError) as error:
        raise ValueError(
            f"{path} must be an undamaged digest, got a damaged file "
            f"({type(error).__name__}). Restore a copy, or delete it and use "
            f"--data-changed={ACCEPT}."
        ) from error


def _bytes_of(words):
    return np.frombuffer("".join(f"{word}{END}" for word in words).encode(), np.uint8)


def _describe(text):
    return text.tobytes().decode().split(END)[:-1]


def difference(kept: Digest, now: Digest) -> str:
    """Describe the changes between two digests, by count and names; "": equal."""
    lists = {}
    old = new = np.arange(len(kept.names))
    if kept.names != now.names:
        at = {name: row for row, name in enumerate(now.names)}
        before = {*kept.names}
        lists["added"] = [name for name in now.names if name not in before]
        lists["gone"] = [name for name in kept.names if name not in at]
        old = np.array([i for i, name in enumerate(kept.names) if name in at], int)
        new = np.array([at[kept.names[row]] for row in old], int)
    for change, is_changed, words in _changes(kept, now, old, new):
        lists[change] = [
            f"{kept.names[old[i]]}: {words(kept, old[i])}, now {words(now, new[i])}"
            for i in np.flatnonzero(is_changed)
        ]
    found = [f"{len(x)} {change} ({_first(x)})" for change, x in lists.items() if x]
    return "; ".join(found)


def _changes(kept, now, old, new) -> Iterator:
    """Yield (change, mask [m], text of an image) of images `old`, now `new`."""
    yield (
        "relabeled",
        kept.identities[old] != now.identities[new],
        lambda of, row: of.identities[row],
    )
    sums = kept.checksums[old], now.checksums[new]
    is_known = (sums[0] != 0) & (sums[1] != 0)
    yield (
        "with other contents",
        (kept.sizes[old] != now.sizes[new]) | (is_known & (sums[0] != sums[1])),
        lambda of, row: f"{of.sizes[row]} bytes, checksum {of.checksums[row]:08x}",
    )
    columns = [(one.uses, one.clients, one.numbers) for one in (kept, now)]
    pairs = zip(*columns, strict=True)
    is_moved = np.any([a[old] != b[new] for a, b in pairs], axis=0)
    yield "with another use", is_moved, _use


def _use(of, row):
    client, number = of.clients[row], of.numbers[row]
    words = [of.uses[row]]
    words += [f"of client {client}"] if client >= 0 else []
    words += [f"as number {number}"] if number >= 0 else []
    return " ".join(words)


def _first(names):
    more = ", ..." if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def digest_task(task: Task) -> Digest | None:
    """Digest of a task's images; without names, of rows and labels.

    None without any, or without labels, or for what is no `Task`.
    """
    if not isinstance(task, Task):
        return None
    if task.used is not None:
        return digest_of(task.used)
    targets = {} if task.dataset is None else task.dataset.targets
    if "label" not in targets or np.ndim(targets["label"]) != 1:
        return None
    names, labels = np.unique(targets["label"], return_inverse=True)
    rows = Source(None, labels, tuple(map(str, names)), ())
    offsets = np.asarray(task.population.offsets)
    client = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return digest_of(
        DataUsage(rows, {"train": UsedRows(np.arange(len(client)), client)})
    )


def keep(task: Task, folders: Collection[pathlib.Path]) -> None:
    """Write the digest for stages without a checkpoint, in the first process."""
    fresh = [folder for folder in folders if not is_trained(folder)]
    now = digest_task(task) if fresh and meshes.is_first_process() else None
    for folder in fresh if now else ():
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
      changed: ACCEPT prints what has changed and goes on.
      is_kept: whether what is accepted is what the stages are trained on from now on.
    """
    trained = [folder for folder in folders if is_trained(folder)]
    now = digest_task(task) if trained else None
    for folder in trained if now else ():
        path = folder / FILE
        has_changed = compare(path, now, changed) if path.exists() else True
        if not path.exists():
            _check_unrecorded(task, path, changed)
        if has_changed and is_kept:
            write(now, path)


def _check_unrecorded(task, path, changed):
    """Raise ValueError for a stage without a digest whose test images may have changed.

    It is of a version that drew them otherwise.
    """
    source = task.used.source if task.used else None
    is_drawn = source is not None and source.roles is None  # else its files say it
    if is_drawn and get_stored(source).is_named and changed != ACCEPT:
        raise ValueError(
            f"{path} must exist to compare the data, but does not, as in runs of an "
            "earlier version, which chose other test images: the current ones may have "
            "been trained on. Train in another --workdir, or use the data as they are "
            f"with --data-changed={ACCEPT}."
        )
    print(f"{path} is missing: the data cannot be compared.", flush=True)


def agreement(
    task: Task, changed: str | None
) -> Callable[[Collection[pathlib.Path]], None]:
    """Build the `check` of the stages that a run keeps, for `workdir.claim`."""
    return lambda folders: check(task, folders, changed=changed, is_kept=True)


def compare(path: pathlib.Path, now: Digest, changed: str | None) -> bool:
    """Whether data differ from a stored digest; raises ValueError unless accepted."""
    what = difference(read(path), now)
    if what and changed != ACCEPT:
        raise ValueError(
            f"{path.parent} must be used with the data that it was trained on, but "
            f"these have changed: {what}. Restore them, train in another --workdir, "
            f"or use them as they are with --data-changed={ACCEPT}."
        )
    if what:
        print(f"{path.parent}: its data have changed: {what}.", flush=True)
    return bool(what)
