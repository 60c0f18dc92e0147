"""Data digest of a stage: which images were used, and for what.

A stage's folder holds `data.npz`: name, identity, size and checksum of every image that
the run uses, whether it is for training or for a test, its client and its class; some
8 MB for a million images. It is compared when the stage is resumed, evaluated, opened
or reused, so that changed data are not taken for those that it was trained on. The
data's path is not part of it.
"""

import collections
import pathlib
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from fedfr_jax import manifest
from fedfr_jax import mesh as meshes
from fedfr_jax.data.sources.selection import get_stored
from fedfr_jax.files import read_npz, replace_file
from fedfr_jax.runs.checkpoint import is_trained
from fedfr_jax.types import DataUsage, Source, Task, UsedRows

FILE = "data.npz"
ACCEPT = "accept"  # value of --data-changed
MAX_NAMES = 3  # images of each change that a message names


class Digest(NamedTuple):
    """Names, identities, checksums and uses of n images."""

    names: np.ndarray  # [n] str, each once
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
        names=_make_unique(np.array([stored.names[row] for row in rows.tolist()], str)),
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


def _make_unique(names: np.ndarray) -> np.ndarray:
    """Make names unique: a repeated image (as in ratings) becomes "<name> #2"."""
    counts, unique = collections.Counter(), []
    for name in names.tolist():
        counts[name] += 1
        unique.append(name if counts[name] == 1 else f"{name} #{counts[name]}")
    return np.array(unique, str)


def write(digest: Digest, path: pathlib.Path) -> None:
    """Write a digest to a file, and cover it by the folder's manifest."""
    manifest.cover(path.parent, {path.name: None})
    with replace_file(path) as file:
        np.savez_compressed(file, **digest._asdict())
    manifest.cover_files(path.parent, [path.name])


def read(path: pathlib.Path) -> Digest:
    """Read a digest from a file."""
    manifest.check_file(path)
    try:
        arrays = {k: x for k, x in read_npz(path).items() if isinstance(x, np.ndarray)}
        return Digest(**arrays)
    except Exception as error:  # of zipfile, zlib and NumPy
        raise ValueError(
            f"{path} must be an undamaged digest, got a damaged file "
            f"({type(error).__name__}). Restore a copy, or delete it and use "
            f"--data-changed={ACCEPT}."
        ) from error


def difference(stored: Digest, now: Digest) -> str:
    """Describe the images in which two digests differ, by count and names; "": none."""
    _, old, new = np.intersect1d(
        stored.names, now.names, assume_unique=True, return_indices=True
    )
    before = Digest(*(array[old] for array in stored))
    after = Digest(*(array[new] for array in now))
    is_known = (before.checksums != 0) & (after.checksums != 0)
    is_changed = is_known & (before.checksums != after.checksums)
    is_changed |= (before.identities != after.identities) | (before.uses != after.uses)
    is_changed |= (before.sizes != after.sizes) | (before.clients != after.clients)
    is_changed |= before.numbers != after.numbers
    added, gone = np.delete(now.names, new), np.delete(stored.names, old)
    shown = [
        f"{before.names[i]} was {_describe(before, i)} and is {_describe(after, i)}"
        for i in np.flatnonzero(is_changed)[:MAX_NAMES]
    ]
    shown += [f"{name} is new" for name in added[:MAX_NAMES]]
    shown += [f"{name} is gone" for name in gone[:MAX_NAMES]]
    count = int(is_changed.sum()) + len(added) + len(gone)
    more = "; ..." if count > len(shown) else ""
    return f"{count} images differ: {'; '.join(shown)}{more}" if count else ""


def _describe(digest: Digest, row: int) -> str:
    """What a digest has of an image."""
    client, number = digest.clients[row], digest.numbers[row]
    text = f"{digest.uses[row]} of {digest.identities[row]}"
    text += f" at client {client}" if client >= 0 else ""
    text += f" as number {number}" if number >= 0 else ""
    return f"{text}, {digest.sizes[row]} bytes of sum {digest.checksums[row]:08x}"


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
    source = Source(lambda rows: (), labels, tuple(map(str, names)), ())
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
        manifest.check_file(path)
        has_changed = not path.exists() or compare(path, now, changed)
        if not path.exists():
            print(f"{path} is missing: the data cannot be compared.", flush=True)
        if has_changed and is_kept:
            write(now, path)


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
