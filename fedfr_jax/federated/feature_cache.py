"""Features of a frozen prefix, computed once per example and view, and kept.

A data set of features takes the place of the images: rounds train on it. It lies on the
devices, in host memory, or in a file of the library's cache folder whose name is a
digest of the examples, of how the first of them is preprocessed, of the frozen leaves
and of the program that they are used by. A file that is found there is compared with
features of some examples, computed anew.
"""

import hashlib
import pathlib
import shutil
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import Stream, stream
from fedfr_jax.federated.inference import build_embed
from fedfr_jax.federated.model_parallel import placement
from fedfr_jax.files import cache_folder, replace_file
from fedfr_jax.models.frozen_prefix import FEATURES, cut, features_of
from fedfr_jax.types import (
    Augment,
    Dataset,
    FeaturePlace,
    FeatureStorage,
    Model,
    PyTree,
    input_structs,
)

SHARE = 4  # of what is free, `auto` takes this part at most
CHUNK = 64  # batches of a device that are computed at a time
PROBES = 64  # examples of a file that are computed anew
GIB = 2**30


class Kept(NamedTuple):
    """A data set to train on, how it is batched, and one line that says what it is."""

    table: Dataset | Stream
    batching: Batching
    text: str


def keep_features(
    model: Model,
    table: Dataset | Stream,
    batching: Batching,
    mesh: Mesh,
    storage: FeatureStorage,
    *,
    is_planned: bool = False,
) -> Kept:
    """Replace the images of a data set by features of a model's frozen prefix.

    Args:
      model: of `with_frozen`, whose frozen leaves are set.
      batching: views of its augment must be counted, or there is none.
      storage: auto takes the devices if the features fit there, else the host, else
        leaves the images.
      is_planned: whether only the shapes of the features count.

    Raises:
      ValueError: for a place where no features can be kept.
    """
    place = storage.place
    if place == "disk" and jax.process_count() > 1:
        raise ValueError(
            "features must be auto, off, device or host with several processes, got "
            "'disk'."
        )
    if place == "off":
        return Kept(table, batching, "frozen leaves run in every step")
    reason = why_not(model, table, batching)
    if reason is None:
        size = FeatureSize.of(model, table, batching)
        chosen = choose_place(size, mesh, storage.gib) if place == "auto" else place
        if chosen is not None:
            values = np.broadcast_to(np.zeros((), size.dtype), size.shape)
            if not is_planned:
                here = storage._replace(place=chosen)
                values = compute(model, table, batching, mesh, size, here)
            kept = table_of(values, table, chosen)
            views = batching._replace(augment=of_views(batching.augment, size.views))
            return Kept(kept, views, size.describe(chosen))
        reason = f"{size.num_bytes / GIB:.1f} GiB of features do not fit"
    if place != "auto":
        raise ValueError(f"features must be auto or off, got {place!r}: {reason}.")
    return Kept(table, batching, f"frozen leaves run in every step: {reason}")


def why_not(model: Model, table: Dataset | Stream, batching: Batching) -> str | None:
    """Why no features of a prefix can be kept; None if they can."""
    if not batching.num_views:
        return "the augmentation has views that cannot be counted"
    if any(np.ndim(x) > 1 for x in table.targets.values()):
        return "targets are images, which an augmentation changes too"
    variables, key = jax.eval_shape(model.init, jax.random.key(0)), jax.random.key(0)

    def at(size):
        x = input_structs(model.input_shape, size)
        return cut(model, variables, x, True, key)

    if not at(2).has_work:
        return "the first layer is trained"
    two, three = at(2).crossing, at(3).crossing
    if [(2 * x.shape[0], x.shape[1:]) for x in three] != [
        (3 * x.shape[0], x.shape[1:]) for x in two
    ]:
        return "what frozen layers make of an example depends on its batch"
    return None


class FeatureSize(NamedTuple):
    """Size of all features."""

    examples: int  # T
    views: int  # F
    numbers: int  # D
    dtype: np.dtype

    @classmethod
    def of(cls, model: Model, table: Dataset | Stream, batching: Batching):
        """Size of the features of a data set."""
        x = input_structs(model.input_shape, 2)
        found = jax.eval_shape(features_of(model), model.frozen.shapes, x)
        views = max(batching.num_views, 1)
        return cls(table.num_examples, views, found.shape[1], found.dtype)

    @property
    def shape(self) -> tuple[int, int, int]:
        """[T, F, D]."""
        return self.examples, self.views, self.numbers

    @property
    def num_bytes(self) -> int:
        """Bytes of all features."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def describe(self, place: str) -> str:
        """What is kept where, in words."""
        views = "" if self.views == 1 else f" in {self.views} views"
        return (
            f"features of {self.examples} examples{views}, {self.numbers} numbers "
            f"each, {self.num_bytes / 2**20:.0f} MiB, are computed once and kept: "
            f"{place}"
        )


def choose_place(
    size: FeatureSize, mesh: Mesh, gib: float | None
) -> FeaturePlace | None:
    """Where features fit: device, host, or None."""

    def fits(free):
        limit = (free or 0) / SHARE if gib is None else min(gib * GIB, free or 0)
        return size.num_bytes <= limit

    if fits(meshes.free_bytes(mesh)):
        return "device"
    free = meshes.local_min(meshes.free_host_bytes(), is_shared=True)
    return "host" if fits(free) else None


def compute(
    model: Model,
    table: Dataset | Stream,
    batching: Batching,
    mesh: Mesh,
    size: FeatureSize,
    storage: FeatureStorage,
) -> np.ndarray:
    """Features [T, F, D] of all examples, from a file if there is one."""
    embed = build_embed(features_of(model), batching, mesh)
    frozen = model.frozen.on(mesh, placement)

    def rows(start: int, end: int) -> np.ndarray:
        here = np.arange(start, end, dtype=np.int32)
        return meshes.fetch(embed(frozen, table, here))[: len(here)]

    step = CHUNK * batching.batch_size * mesh.shape[meshes.CLIENTS]
    chunks = [(i, min(i + step, size.examples)) for i in range(0, size.examples, step)]
    if storage.place != "disk":
        values = np.empty(size.shape, size.dtype)
        for start, end in chunks:
            values[start:end] = rows(start, end)
        return values
    examples = digest_examples(table, batching, storage.images)
    name = digest(model, size, examples)
    path = cache_folder() / "features" / f"{name}.npy"
    if (found := read_file(path, size, rows)) is not None:
        return found
    check_room(path.parent, size.num_bytes)
    with replace_file(path) as file:
        header = {"descr": size.dtype.str, "fortran_order": False, "shape": size.shape}
        np.lib.format.write_array_header_1_0(file, header)
        for start, end in chunks:
            file.write(np.ascontiguousarray(rows(start, end)).tobytes())
    return np.load(path, mmap_mode="r")


def check_room(folder: pathlib.Path, num_bytes: int) -> None:
    """Raise ValueError for features that do not fit on the disk of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if num_bytes > (free := shutil.disk_usage(folder).free):
        raise ValueError(
            f"features must fit on the disk of {folder}, got {num_bytes / GIB:.1f} GiB "
            f"of features and {free / GIB:.1f} GiB free. Delete files there, let "
            "$XDG_CACHE_HOME name another disk, or choose host or off."
        )


def digest(model: Model, size: FeatureSize, examples: str) -> str:
    """Digest of examples, frozen leaves, and the program that makes features."""
    x = input_structs(model.input_shape, 2)
    program = jax.make_jaxpr(features_of(model))(model.frozen.shapes, x)
    parts = f"{program}{size}{digest_leaves(model.frozen.value)}{examples}"
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def digest_examples(
    table: Dataset | Stream, batching: Batching, images: str = ""
) -> str:
    """Digest of examples and of how they are preprocessed.

    Args:
      images: digest of what a stream reads.
    """
    is_stream, rows = isinstance(table, Stream), np.zeros(1, np.int64)
    first = table.take(rows) if is_stream else jax.tree.map(lambda x: x[rows], table)
    views = range(max(batching.num_views, 1))
    seen = [batching.with_deterministic(i, first.inputs) for i in views]
    return images + digest_leaves((table.targets if is_stream else table, seen))


def digest_leaves(tree: PyTree) -> str:
    """SHA-256 of the names, shapes and numbers of leaves."""
    total = hashlib.sha256()
    for name, leaf in trees.by_name(tree).items():
        array = np.asarray(leaf)
        total.update(f"{name} {array.dtype} {array.shape}".encode())
        total.update(array.tobytes())
    return total.hexdigest()


def read_file(path, size: FeatureSize, rows: Callable) -> np.ndarray | None:
    """Features of a file; None if it is of other examples, or none."""
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    if values.shape != size.shape or values.dtype != size.dtype:
        return None
    for start in np.linspace(0, size.examples - 1, 4, dtype=np.int64):
        end = min(int(start) + PROBES // 4, size.examples)
        fresh = rows(int(start), end)
        if not np.allclose(values[start:end], fresh, rtol=1e-4, atol=1e-5):
            return None
    return values


def table_of(
    values: np.ndarray, table: Dataset | Stream, place: FeaturePlace
) -> Dataset | Stream:
    """Data set with features [T, F, D] in place of its inputs."""
    targets = jax.tree.map(np.asarray, table.targets)
    if place == "device":
        return Dataset({FEATURES: values}, targets)
    read = lambda rows: {FEATURES: values[rows]}
    if isinstance(table, Stream):
        return stream(read, targets, memory=table.memory, waves=table.waves)
    return stream(read, targets)


def of_views(augment: Augment | None, num_views: int) -> Augment:
    """The augment of features [F, D], which takes the view that of images would."""

    def view(i, inputs):
        return {FEATURES: inputs[FEATURES][i]}

    def apply(key, inputs, targets):
        sampled = num_views > 1 and augment and augment.sample_view
        return view(sampled(key) if sampled else 0, inputs), targets

    sample = augment.sample_view if augment and num_views > 1 else None
    return Augment(apply, num_views, apply_view=view, sample_view=sample)
