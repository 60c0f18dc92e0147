"""Devices and the mesh: shardings, transfers, free memory.

The mesh has clients along one axis and the shards of one model along the other. In a
multi-process run every process runs the same program, and an array on the mesh has
shards that a process cannot address. So host values are moved to the mesh and back only
by the functions here; in a single process they are those of JAX.

XLA can compile for devices that are not attached. Inside `use_described` a mesh is made
of such devices, arrays put on them are ShapeDtypeStructs with shardings (`put_global`),
and choices by kind of device are made for them.
"""

import contextlib
import contextvars
import functools
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedfr_jax.schema import is_traced
from fedfr_jax.types import PyTree

MIB = 2**20
BARRIER_SECONDS = 24 * 3600  # above a round's; a process that ends is noticed earlier
MEMINFO = pathlib.Path("/proc/meminfo")  # of Linux
BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")  # identifies the machine

# Share of a device's memory that programs can use: on a GPU what JAX reserves unless
# XLA_PYTHON_CLIENT_MEM_FRACTION is set (docs.jax.dev, GPU memory allocation); on a TPU
# our choice.
USABLE = {"gpu": 0.75, "tpu": 0.97}


class DescribedDevices(NamedTuple):
    """Devices that are not attached, to compile for."""

    devices: tuple[jax.Device, ...]
    memory: int  # bytes of each that programs can use
    has_host_memory: bool  # whether they can place arrays in host memory


_DESCRIBED: contextvars.ContextVar[DescribedDevices | None] = contextvars.ContextVar(
    "devices to compile for", default=None
)


@contextlib.contextmanager
def use_described(
    devices: Sequence[jax.Device], *, memory: int, has_host_memory: bool = True
) -> Iterator[None]:
    """Compile for `devices` within the block, without running anything.

    Args:
      memory: bytes of each device that programs can use.
      has_host_memory: whether they can place arrays in pinned host memory.
    """
    described = DescribedDevices(tuple(devices), memory, has_host_memory)
    token = _DESCRIBED.set(described)
    try:
        yield
    finally:
        _DESCRIBED.reset(token)


def available_devices() -> DescribedDevices | None:
    """The described devices; None outside of `use_described`."""
    return _DESCRIBED.get()


def list_devices() -> Sequence[jax.Device]:
    """All devices that a mesh can be made of."""
    described = available_devices()
    return described.devices if described else jax.devices()


def platform() -> str:
    """Platform of the devices that are traced for: cpu, gpu or tpu.

    Within `jax.shard_map` they are those of its mesh, else those of `list_devices`.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return list_devices()[0].platform if device is None else device.platform


def optimization_level(platform: str) -> dict[str, Any]:
    """Compiler options of a program on a CPU, unless XLA_FLAGS sets its level.

    LLVM's highest level takes 15 % longer over a round and three times as long over
    many random numbers, which then are no faster.
    """
    level = "xla_backend_optimization_level"
    is_set = platform != "cpu" or level in os.environ.get("XLA_FLAGS", "")
    return {} if is_set else {level: 2}


GPUS = ("gpu", "cuda", "rocm")  # values of `platform` for one


def memory() -> int | None:
    """Memory of a device in bytes; None if unknown."""
    if described := available_devices():
        return described.memory
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def has_host_memory(kind: str) -> bool:
    """Whether the devices support a `kind` of host memory."""
    if described := available_devices():
        return described.has_host_memory
    kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
    return kind in kinds


def free_bytes(mesh: Mesh) -> int | None:
    """Free memory of a device in bytes; None if unknown.

    Each device of a CPU has an equal share of the machine's free memory. Of several
    processes, which must all call this, the minimum.
    """
    devices = mesh.local_devices
    stats = devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return local_min(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    free = free_host_bytes()
    if devices[0].platform != "cpu" or free is None:
        return local_min(None)
    return local_min(free // len(devices), is_shared=True)


def free_host_bytes() -> int | None:
    """Free memory of the machine in bytes; None if unknown."""
    text = MEMINFO.read_text() if MEMINFO.exists() else ""
    match = re.search(r"^MemAvailable: +(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def local_min(free: int | None, is_shared: bool = False) -> int | None:
    """Minimum of every process's `free` bytes; None if one is unknown.

    Args:
      is_shared: whether the processes on one machine share them.
    """
    if jax.process_count() == 1:
        return free
    machine = zlib.crc32(BOOT.read_bytes()) if BOOT.exists() else jax.process_index()
    values = np.array([-1 if free is None else free // MIB, machine % 2**31], np.int32)
    return min_across_processes(multihost_utils.process_allgather(values), is_shared)


def min_across_processes(gathered: np.ndarray, is_shared: bool) -> int | None:
    """`local_min` of gathered values [P, 2]: MiB, or -1, and the machine."""
    free, machines = gathered.astype(np.int64).T
    if is_shared:
        free = free // (machines[:, None] == machines[None]).sum(axis=1)
    return None if free.min() < 0 else int(free.min()) * MIB


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether the backend ran out of memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


CLIENTS = "clients"
PROCESSES = "processes"  # of a mesh with a device of each
MODEL = "model"


def make_mesh(num_client_shards: int = 0, num_model_shards: int = 1) -> Mesh:
    """Build a mesh of [clients, model] devices, with both axes Auto.

    Args:
      num_client_shards: devices along `clients`; 0 takes all.
      num_model_shards: devices along `model`, in [1, devices].

    Raises:
      ValueError: for more devices than exist, when a process would have none of them,
        or when one model's devices are of several processes.
    """
    devices = sorted(list_devices(), key=_slice_index)
    num_clients = num_client_shards or max(len(devices) // num_model_shards, 1)
    size = f"{num_clients} x {num_model_shards}"
    if num_clients * num_model_shards > len(devices):
        raise ValueError(
            f"mesh clients x model must fit {len(devices)} devices, got {size}."
        )
    grid = np.array(devices[: num_clients * num_model_shards])
    if (num_used := len({d.process_index for d in grid})) < jax.process_count():
        raise ValueError(
            "mesh clients x model must have devices of all "
            f"{jax.process_count()} processes, got {size} of {num_used}."
        )
    grid = grid.reshape(num_clients, num_model_shards)
    if any(len({d.process_index for d in row}) > 1 for row in grid):
        raise ValueError(
            "mesh model shards must divide the devices of every process, "
            f"got {num_model_shards}."
        )
    return Mesh(grid, (CLIENTS, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def _slice_index(device: jax.Device) -> int:
    """Slice of a TPU, whose devices are neighbors in a mesh; 0 of other devices."""
    return device.slice_index if hasattr(device, "slice_index") else 0


def num_model_shards() -> int:
    """Devices along `model` over which XLA cuts what is traced; 1 if there are none."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[MODEL] if MODEL in mesh.auto_axes else 1


def device_grid(mesh: Mesh) -> tuple[int, int]:
    """(number of devices along `clients`, along `model`)."""
    return mesh.shape[CLIENTS], mesh.shape[MODEL]


def flatten_mesh(mesh: Mesh) -> Mesh:
    """Mesh with all devices along `clients`, for training one model."""
    grid = mesh.devices.reshape(-1, 1)
    return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def longest_sharded_axis(
    shape: tuple[int, ...], axis: str, num_devices: int, smallest: int
) -> P:
    """PartitionSpec of the longest axis that divides evenly; the last of equal ones.

    Args:
      smallest: elements; an array with fewer is not sharded.
    """
    axes = [i for i, size in enumerate(shape) if size % num_devices == 0]
    if num_devices == 1 or np.prod(shape) < smallest or not axes:
        return P()
    best = max(axes, key=lambda i: (shape[i], i))
    return P(*[None] * best, axis)


@functools.cache
def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of an array that is replicated on every device."""
    return NamedSharding(mesh, P())


@functools.cache
def over_clients(mesh: Mesh) -> NamedSharding:
    """Sharding of the leading axis over the `clients` devices."""
    return NamedSharding(mesh, P(CLIENTS))


def over_client_devices(
    mesh: Mesh, function: Callable, in_specs: PyTree, out_specs: PyTree
) -> Callable:
    """`jax.shard_map` over `clients`, with `model` left to XLA.

    If `model` has one device it is manual too: otherwise JAX adds a constraint after
    every operation, thousands in a deep network, for XLA to drop.
    """
    is_split = mesh.shape[MODEL] > 1
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={CLIENTS} if is_split else set(mesh.axis_names),
        check_vma=False,  # else gradients of replicated values would be summed
    )


def over_model_devices(
    function: Callable, in_axes: Sequence[int | None], out_axis: int
) -> Callable:
    """`jax.shard_map` over `model`, where XLA cuts over it: an axis of each array.

    Args:
      in_axes: of each argument the axis that is cut; None: each device has all.
    """

    def cut(axis):
        return P() if axis is None else P(*[None] * axis, MODEL)

    return jax.shard_map(
        function,
        in_specs=tuple(map(cut, in_axes)),
        out_specs=cut(out_axis),
        axis_names={MODEL},
        check_vma=False,
    )


def sum_over_clients(mesh: Mesh, tree: PyTree) -> PyTree:
    """Sum over the `clients` devices, within a shard_map over them.

    XLA refuses a sum over one device when `model` has several.
    """
    return jax.lax.psum(tree, CLIENTS) if mesh.shape[CLIENTS] > 1 else tree


def max_over_clients(mesh: Mesh, x: jax.Array) -> jax.Array:
    """Maximum over the `clients` devices, within a shard_map over them."""
    return jax.lax.pmax(x, CLIENTS) if mesh.shape[CLIENTS] > 1 else x


def put_global(tree: PyTree, sharding: NamedSharding | PyTree) -> PyTree:
    """Put `tree`, which is equal in every process, on the mesh.

    A process copies only the shards of its own devices; arrays on the mesh move from
    device to device. `sharding` is one for all, or a tree of one per leaf. On described
    devices the result is ShapeDtypeStructs, unless this is traced.
    """
    if available_devices() and not is_traced(jnp.zeros(())):
        return shapes_at(tree, _for_each(tree, sharding))
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    return jax.tree.map(_put_parts, tree, _for_each(tree, sharding))


def put_numbers(tree: PyTree, sharding: NamedSharding) -> PyTree:
    """`put_global` for a round's small host arrays.

    On one device they pass through a compiled identity: on a CPU that takes a fifth of
    the time of `jax.device_put`. With more devices it is slower.
    """
    leaves, structure = jax.tree.flatten(tree)
    is_host = all(isinstance(x, np.ndarray | np.generic) for x in leaves)
    if not is_host or sharding.mesh.size > 1 or available_devices():
        return put_global(tree, sharding)
    return jax.tree.unflatten(structure, _identity(sharding)(*leaves))


@functools.cache
def _identity(sharding):
    return jax.jit(lambda *x: x, in_shardings=sharding, out_shardings=sharding)


def shapes_at(tree: PyTree, shardings: PyTree) -> PyTree:
    """ShapeDtypeStructs of `tree`, arrays or shapes, with the given shardings."""

    def struct(x, sharding):
        dtype = jax.dtypes.result_type(x)
        return jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=sharding)

    return jax.tree.map(struct, tree, shardings)


def _for_each(tree, sharding):
    if isinstance(sharding, NamedSharding):
        return jax.tree.map(lambda _: sharding, tree)
    return sharding


def _put_parts(x, sharding):
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _put_parts(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def fetch(tree: PyTree) -> PyTree:
    """Fetch unsharded arrays to host memory, in every process; a collective call."""
    return jax.device_get(replicate(tree))


def replicate(tree: PyTree) -> PyTree:
    """Arrays that every process can fetch alone; a collective call."""
    if jax.process_count() == 1:
        return tree

    def whole(x):
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        if x.is_fully_replicated:
            return x
        assert isinstance(x.sharding, NamedSharding)
        return jax.device_put(x, replicated(x.sharding.mesh))

    return jax.tree.map(whole, tree)


@functools.cache
def local_shards(mesh: Mesh, num_shards: int = 0) -> np.ndarray:
    """Indices of the shards over the `clients` devices on this process, ascending [V'].

    Args:
      num_shards: V, a multiple of the devices; 0: one per device.
    """
    here = jax.process_index()
    is_local = [any(d.process_index == here for d in row) for row in mesh.devices]
    shards = np.flatnonzero(np.repeat(is_local, max(num_shards // len(is_local), 1)))
    shards.flags.writeable = False
    return shards


def process_of_shards(mesh: Mesh) -> np.ndarray:
    """Process of each of the `clients` devices, [A]."""
    return np.array([row[0].process_index for row in mesh.devices])


def put_local(
    tree: PyTree, shardings: NamedSharding | PyTree, num_shards: int
) -> PyTree:
    """Put arrays [V, ...] over the `clients` devices, from each process's [V', ...].

    `shardings`, one for all or one per leaf, cut the leading axis over `clients`.
    """
    if not jax.tree.leaves(tree):
        return tree
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def put_leaf(x, sharding):
        shards = local_shards(sharding.mesh, num_shards).tolist()
        index_of = {v: i for i, v in enumerate(shards)}

        def read(index):
            start, stop, _ = index[0].indices(num_shards)
            here = slice(index_of[start], index_of[start] + stop - start)
            return x[(here, *index[1:])]

        return jax.make_array_from_callback((num_shards, *x.shape[1:]), sharding, read)

    return jax.tree.map(put_leaf, tree, _for_each(tree, shardings))


def fetch_local(tree: PyTree) -> PyTree:
    """Fetch this process's [V', ...] of arrays [V, ...] over the `clients` devices."""
    if not jax.tree.leaves(tree):
        return tree
    if jax.process_count() == 1:
        return jax.device_get(tree)

    def fetch_leaf(x):
        bounds = lambda shard: shard.index[0].indices(len(x))[:2]
        starts, count = {}, 0
        for start, stop in sorted({bounds(shard) for shard in x.addressable_shards}):
            starts[start], count = count, count + stop - start
        host = np.empty((count, *x.shape[1:]), x.dtype)
        for shard in x.addressable_shards:
            start, stop = bounds(shard)
            here = slice(starts[start], starts[start] + stop - start)
            host[(here, *shard.index[1:])] = shard.data
        return host

    return jax.tree.map(fetch_leaf, tree)


GATHERED_BYTES = 2**28  # of each process that are on its device together


def gather_processes(tree: PyTree) -> PyTree:
    """Host arrays [n, ...] of all processes [P * n, ...], in every process.

    They pass through one device of each process, GATHERED_BYTES of each at a time, so
    that devices need P times so much memory, however large the arrays are.
    """
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    one_each = Mesh(np.array([firsts[i] for i in sorted(firsts)]), (PROCESSES,))
    cut = NamedSharding(one_each, P(PROCESSES))
    copy = jax.jit(lambda x: x, out_shardings=replicated(one_each))

    def gather(x):
        step = max(GATHERED_BYTES // max(x[:1].nbytes, 1), 1)
        parts = []
        for start in range(0, len(x), step):
            here = x[None, start : start + step]
            whole = jax.make_array_from_process_local_data(cut, here)
            parts.append(np.asarray(copy(whole)))  # [P, step, ...]
        total = len(firsts) * len(x)
        return np.concatenate(parts, axis=1).reshape(total, *x.shape[1:])

    return jax.tree.map(gather, tree)


def is_everywhere(fact: bool) -> bool:
    """Whether `fact` is true in all processes; a collective call."""
    if jax.process_count() == 1:
        return fact
    return bool(multihost_utils.process_allgather(np.array(fact)).all())


def is_first_process() -> bool:
    """Whether this process prints and writes a run's files."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Wait until every process has reached the barrier of this name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def host_barrier(name: str) -> None:
    """`barrier` without the devices, which may be at work, from any thread.

    Args:
      name: of this barrier alone.
    """
    if jax.process_count() > 1:
        from jax._src.distributed import global_state  # which Orbax uses too

        assert global_state.client is not None
        global_state.client.wait_at_barrier(name, BARRIER_SECONDS * 1000)


def gather_texts(name: str, text: str) -> list[str]:
    """Texts of all processes, in every process, without the devices.

    Args:
      name: of this call alone.
    """
    if jax.process_count() == 1:
        return [text]
    from jax._src.distributed import global_state

    client, timeout = global_state.client, BARRIER_SECONDS * 1000
    assert client is not None
    client.key_value_set(f"{name}/{jax.process_index()}", text)
    numbers = range(jax.process_count())
    return [client.blocking_key_value_get(f"{name}/{i}", timeout) for i in numbers]


@contextlib.contextmanager
def first_process_first(name: str) -> Iterator[None]:
    """Run the block in the first process, then in all others."""
    if not is_first_process():
        barrier(name)
    yield
    if is_first_process():
        barrier(name)
