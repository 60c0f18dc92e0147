"""The device mesh: clients along one axis, the shards of one model along the other.

In a run of several processes every process runs the same program on the same numbers,
and an array on the mesh has parts that a process cannot see. So host values come onto
the mesh and back by the functions here alone; in a single process they are JAX's own.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedfr_jax import devices as kinds
from fedfr_jax.types import PyTree

CLIENTS = "clients"
MODEL = "model"


def make_mesh(num_client_shards: int = 0, num_model_shards: int = 1) -> Mesh:
    """Mesh of [clients, model] devices, both axes Auto.

    Args:
      num_client_shards: devices along `clients`; 0 takes all that are left.
      num_model_shards: devices along `model`, in [1, devices].

    Raises:
      ValueError: when more devices are asked for than exist, when a process would
        have none of them, or when one model's devices are of several processes.
    """
    devices = kinds.devices()
    wanted = num_client_shards or max(len(devices) // num_model_shards, 1)
    if wanted * num_model_shards > len(devices):
        raise ValueError(
            f"mesh clients x model must fit the {len(devices)} devices that exist, "
            f"got {wanted} x {num_model_shards}."
        )
    grid = np.array(devices[: wanted * num_model_shards])
    if (used := len({d.process_index for d in grid})) < jax.process_count():
        raise ValueError(
            "mesh clients x model must have devices of all "
            f"{jax.process_count()} processes, got {wanted} x {num_model_shards} "
            f"of {used}."
        )
    grid = grid.reshape(wanted, num_model_shards)
    if any(len({d.process_index for d in row}) > 1 for row in grid):
        raise ValueError(
            "mesh model shards must divide the devices of every process, "
            f"got {num_model_shards}."
        )
    return Mesh(
        grid,
        (CLIENTS, MODEL),
        axis_types=(AxisType.Auto, AxisType.Auto),
    )


def grid(mesh: Mesh) -> tuple[int, int]:
    """Devices along `clients`, and along `model`."""
    return mesh.shape[CLIENTS], mesh.shape[MODEL]


def first_devices(mesh: Mesh, count: int) -> Mesh:
    """The mesh of the first `count` devices along `clients`; 0: all."""
    grid = mesh.devices[: count or None]
    return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def flat(mesh: Mesh) -> Mesh:
    """All devices of the mesh along `clients`: the whole mesh for one network."""
    grid = mesh.devices.reshape(-1, 1)
    return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def longest_cut(
    shape: tuple[int, ...], axis: str, num_devices: int, smallest: int
) -> P:
    """`axis` on the longest axis that divides evenly, on the last of equals.

    Args:
      smallest: elements; an array that has fewer is not cut.
    """
    axes = [i for i, size in enumerate(shape) if size % num_devices == 0]
    if num_devices == 1 or np.prod(shape) < smallest or not axes:
        return P()
    best = max(axes, key=lambda i: (shape[i], i))
    return P(*[None] * best, axis)


@functools.cache
def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, P())


@functools.cache
def over_clients(mesh: Mesh) -> NamedSharding:
    """The leading axis is cut over the `clients` devices."""
    return NamedSharding(mesh, P(CLIENTS))


def over_client_devices(
    mesh: Mesh, function: Callable, in_specs: PyTree, out_specs: PyTree
) -> Callable:
    """`jax.shard_map` by hand over `clients`, `model` left to XLA.

    Where `model` has one device it is by hand too: otherwise JAX writes a constraint
    behind every operation, thousands in a deep round, for XLA to drop.
    """
    is_cut = mesh.shape[MODEL] > 1
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={CLIENTS} if is_cut else set(mesh.axis_names),
        check_vma=False,  # else gradients of replicated values would be summed
    )


def sum_over_clients(mesh: Mesh, tree: PyTree) -> PyTree:
    """Sum over the `clients` devices, inside a shard_map over them.

    XLA refuses a sum over one device when `model` has several.
    """
    return jax.lax.psum(tree, CLIENTS) if mesh.shape[CLIENTS] > 1 else tree


def max_over_clients(mesh: Mesh, x: jax.Array) -> jax.Array:
    """The largest over the `clients` devices, as `sum_over_clients`."""
    return jax.lax.pmax(x, CLIENTS) if mesh.shape[CLIENTS] > 1 else x


def put(tree: PyTree, sharding: NamedSharding | PyTree) -> PyTree:
    """Copy `tree`, which is the same in every process, onto the mesh.

    A process copies the parts of its own devices only; what is on the mesh already
    moves from device to device. `sharding` is one for all, or a tree of one per leaf.
    Onto devices that are described only goes a shape with its place, but in a trace.
    """
    if kinds.found() and not isinstance(jnp.zeros(()), jax.core.Tracer):
        return shapes_at(tree, _for_each(tree, sharding))
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    return jax.tree.map(_put_parts, tree, _for_each(tree, sharding))


def put_numbers(tree: PyTree, sharding: NamedSharding) -> PyTree:
    """`put` of a round's small host arrays.

    On one device as arguments of a compiled function that gives them back: on a CPU a
    fifth of the time that `jax.device_put` takes. With more devices that is slower.
    """
    leaves, structure = jax.tree.flatten(tree)
    is_host = all(isinstance(x, np.ndarray | np.generic) for x in leaves)
    if not is_host or sharding.mesh.size > 1 or kinds.found():
        return put(tree, sharding)
    return jax.tree.unflatten(structure, _identity(sharding)(*leaves))


@functools.cache
def _identity(sharding):
    return jax.jit(lambda *x: x, in_shardings=sharding, out_shardings=sharding)


def shapes_at(tree: PyTree, shardings: PyTree) -> PyTree:
    """Shape structs of `tree`, arrays or shapes, each with its sharding."""

    def one(x, sharding):
        dtype = jax.dtypes.result_type(x)
        return jax.ShapeDtypeStruct(np.shape(x), dtype, sharding=sharding)

    return jax.tree.map(one, tree, shardings)


def _for_each(tree, sharding):
    if isinstance(sharding, NamedSharding):
        return jax.tree.map(lambda _: sharding, tree)
    return sharding


def _put_parts(x, sharding):
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _put_parts(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def fetch(tree: PyTree) -> PyTree:
    """Whole arrays in host memory, in every process; all must ask for them."""
    if jax.process_count() == 1:
        return jax.device_get(tree)

    def whole(x):
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        return x if x.is_fully_replicated else jax.device_put(x, _whole_of(x))

    return jax.device_get(jax.tree.map(whole, tree))


def _whole_of(x: jax.Array) -> NamedSharding:
    return replicated(x.sharding.mesh)


@functools.cache
def own_shards(mesh: Mesh, num_shards: int = 0) -> np.ndarray:
    """Which shards over the `clients` devices this process has, ascending [V'].

    There are V of them, a multiple of the devices; 0 is one per device.
    """
    here = jax.process_index()
    is_own = [any(d.process_index == here for d in row) for row in mesh.devices]
    own = np.flatnonzero(np.repeat(is_own, max(num_shards // len(is_own), 1)))
    own.flags.writeable = False
    return own


def put_own(tree: PyTree, shardings: NamedSharding | PyTree, num_shards: int) -> PyTree:
    """Arrays [V, ...] over the `clients` devices from each process' own [V', ...].

    `shardings`, one for all or one per leaf, cut the leading axis over `clients`.
    """
    if not jax.tree.leaves(tree):
        return tree
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def one(x, sharding):
        own = own_shards(sharding.mesh, num_shards).tolist()
        place = {v: i for i, v in enumerate(own)}

        def part(index):
            start, stop, _ = index[0].indices(num_shards)
            here = slice(place[start], place[start] + stop - start)
            return x[(here, *index[1:])]

        return jax.make_array_from_callback((num_shards, *x.shape[1:]), sharding, part)

    return jax.tree.map(one, tree, _for_each(tree, shardings))


def fetch_own(tree: PyTree) -> PyTree:
    """This process' own [V', ...] of arrays [V, ...] that `clients` devices hold."""
    if not jax.tree.leaves(tree):
        return tree
    if jax.process_count() == 1:
        return jax.device_get(tree)

    def one(x):
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

    return jax.tree.map(one, tree)


def is_first() -> bool:
    """Whether this process is the one that prints and writes a run's files."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Wait until every process has come to the barrier of this name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


@contextlib.contextmanager
def first_before_others(name: str) -> Iterator[None]:
    """The first process runs the block, then all others do."""
    if not is_first():
        barrier(name)
    yield
    if is_first():
        barrier(name)
