"""Streams: examples read from the host while the devices work.

A `Stream` can replace a `Dataset`. Each device gets only the rows that it needs next:
one thread reads and copies them while the devices work on the chunk before, so that a
device holds two chunks at a time, however large the data. Each of several processes
reads for its local devices only.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from fedfr_jax import mesh as meshes
from fedfr_jax.mesh import available_devices
from fedfr_jax.types import Dataset, InputShape, PyTree, model_inputs

MEMORY = 2**30


@dataclasses.dataclass(eq=False)
class Stream:
    """All examples, on the host, in a `Dataset`'s order; made by `stream`."""

    read: Callable[[np.ndarray], PyTree]  # [n] int64 -> inputs of [n, ...]
    targets: PyTree  # of [T, ...]
    example: Dataset  # shape structs of one example
    memory: int
    waves: int
    # Seconds that the devices have waited for each chunk.
    has_waited: list[float] = dataclasses.field(default_factory=list)

    @property
    def num_examples(self) -> int:
        """Number of examples, T."""
        return len(jax.tree.leaves(self.targets)[0])

    @property
    def input_shape(self) -> InputShape:
        """Shape of one input."""
        return jax.tree.map(lambda x: x.shape, model_inputs(self.example.inputs))

    @property
    def labels(self) -> np.ndarray:
        """targets["label"], [T] int32."""
        return self.targets["label"]

    def with_labels(self, labels: np.ndarray) -> "Stream":
        """Replace the labels [T] of the examples."""
        targets = {**self.targets, "label": labels}
        return dataclasses.replace(self, targets=targets)

    @property
    def example_bytes(self) -> int:
        """Size of one example on a device, in bytes."""
        leaves = jax.tree.leaves(self.example)
        return sum(x.size * x.dtype.itemsize for x in leaves)

    def take(self, rows: np.ndarray) -> Dataset:
        """Read the examples of `rows` [n] into host memory."""
        return Dataset(self.read(rows), jax.tree.map(lambda x: x[rows], self.targets))

    def chunks(
        self, rows_of: Callable[[int], jax.Array], count: int
    ) -> Iterator[tuple[jax.Array, Dataset]]:
        """Chunks as of a `Dataset`; the next one is read while one is used.

        Args:
          rows_of: i -> [A * r] rows of the i-th chunk, sharded over `clients`.
        """

        def load(i):
            rows = rows_of(i)
            assert isinstance(rows.sharding, NamedSharding)
            mesh = rows.sharding.mesh
            assert isinstance(mesh, Mesh)
            size = len(rows) // mesh.shape[meshes.CLIENTS]
            shards = {x.index[0].start or 0: x.data for x in rows.addressable_shards}
            read = lambda a: self.take(np.asarray(shards[a * size], np.int64))
            return rows, put_on_local_devices(mesh, read)

        return prefetch(load, count, [])


def stream(
    read: Callable[[np.ndarray], PyTree],
    targets: PyTree,
    *,
    memory: int = MEMORY,
    waves: int = 0,
) -> Stream:
    """Build a data set that is never in device memory as a whole.

    Args:
      read: rows [n] int64 -> inputs of [n, ...], or images [n, H, W, C] alone, uint8 as
        a rule; called from another thread.
      targets: of [T, ...], or labels [T] int alone.
      memory: bytes that the examples may take on a device.
      waves: waves of clients per segment of a round; 0 takes as many as fit `memory`.
    """
    if not isinstance(targets, Mapping):
        targets = {"label": np.asarray(targets, np.int32)}
    targets = jax.tree.map(np.asarray, targets)
    first = read(np.zeros(1, np.int64))
    read_inputs = read
    if not isinstance(first, Mapping):
        first = {"image": first}
        read_inputs = lambda rows: {"image": read(rows)}
    example = example_shape(Dataset(first, targets))
    return Stream(read_inputs, targets, example, int(memory), waves)


def example_shape(data: Dataset | Stream) -> Dataset:
    """ShapeDtypeStructs of one example."""
    if isinstance(data, Stream):
        return data.example
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), data)


def fits_devices(num_bytes: int, mesh: Mesh) -> bool:
    """Whether arrays of `num_bytes` fit on every device twice, with room for training.

    Asks the devices, and the host, which holds the arrays too; the devices of a CPU
    share its memory, with a copy each.
    """
    if devices := available_devices():
        return 3 * num_bytes <= devices.memory
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    local_devices = mesh.local_mesh.devices
    stats = local_devices.flat[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return 3 * num_bytes <= min(stats["bytes_limit"], host)
    return 3 * num_bytes * local_devices.size <= host


def place_examples(data: Dataset | Stream, mesh: Mesh) -> Dataset | Stream:
    """Put a data set on every device of the mesh; a stream is returned as it is."""
    if isinstance(data, Stream):
        return data
    return meshes.put_global(data, meshes.replicated(mesh))


def prefetch(
    load: Callable[[int], PyTree], count: int, waits: list[float]
) -> Iterator[PyTree]:
    """Yield load(0), ..., load(count - 1), each loaded while the one before is used.

    Seconds of waiting for each are added to `waits`.
    """
    with ThreadPoolExecutor(1, "stream") as reader:
        later = reader.submit(load, 0)
        for i in range(1, count + 1):
            begin = time.perf_counter()
            value = later.result()
            waits.append(time.perf_counter() - begin)
            if i < count:
                later = reader.submit(load, i)
            yield value


def put_on_local_devices(mesh: Mesh, make: Callable[[int], PyTree]) -> PyTree:
    """Arrays [A * r, ...] sharded over `clients`, from each device's [r, ...].

    Args:
      make: a -> host arrays of index a along `clients`; called for each local device.
        The arrays must not change afterwards.

    Returns:
      the arrays, once they are on the devices.
    """
    trees = {a: jax.tree.flatten(make(a)) for a in meshes.local_shards(mesh).tolist()}
    parts = {a: leaves for a, (leaves, _) in trees.items()}
    like, treedef = next(iter(trees.values()))
    sharding = meshes.over_clients(mesh)

    def join(i, leaf):
        count = len(leaf)
        shape = (len(mesh.devices) * count, *leaf.shape[1:])
        device_rows = lambda index: parts[(index[0].start or 0) // count][i]
        return jax.make_array_from_callback(shape, sharding, device_rows)

    arrays = [join(i, leaf) for i, leaf in enumerate(like)]
    return jax.block_until_ready(jax.tree.unflatten(treedef, arrays))


def cut_blocks(data: Stream, rows: np.ndarray, mesh: Mesh, batch_size: int) -> Iterator:
    """`rows` [R] in chunks of A * b, as `Dataset`s sharded over the devices.

    All have one shape: b is a multiple of `batch_size`, and row 0 fills up the last.
    """
    num_devices = mesh.shape[meshes.CLIENTS]
    max_batches = data.memory // (2 * data.example_bytes * batch_size)
    needed_batches = -(-len(rows) // (num_devices * batch_size))
    size = batch_size * max(min(max_batches, needed_batches), 1)
    count = max(-(-len(rows) // (num_devices * size)), 1)
    rows = np.pad(rows, (0, count * num_devices * size - len(rows))).astype(np.int64)
    rows = rows.reshape(count, num_devices, size)

    def load(i):
        return put_on_local_devices(mesh, lambda a: data.take(rows[i, a]))

    return prefetch(load, count, data.has_waited)
