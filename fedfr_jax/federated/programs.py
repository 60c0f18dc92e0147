"""Programs of a round: lowering from shapes, and device memory checks.

Before the first compile only the bytes of a round's client states are known. The
compiler then reports what else a round needs; what is on the device already (server,
examples, arguments) is not counted again. The devices of a CPU share the machine's free
memory, and so do the processes of a run on one machine. All processes check together,
and a lack in one of them is an error in all, because the others would wait for it
forever.
"""

import contextlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.data.stream import Stream
from fedfr_jax.federated import model_parallel
from fedfr_jax.federated.client import num_columns
from fedfr_jax.federated.disclosure import trace_prepare
from fedfr_jax.federated.engine import (
    CallInputs,
    Program,
    RoundConstants,
    empty_prepared,
)
from fedfr_jax.federated.participation import before_round
from fedfr_jax.federated.schedule import num_waves
from fedfr_jax.federated.state import Simulation
from fedfr_jax.federated.streaming import StreamedData, StreamShape
from fedfr_jax.mesh import free_bytes, is_out_of_memory
from fedfr_jax.mesh import shapes_at as placed
from fedfr_jax.types import PyTree

MIB, GIB = 2**20, 2**30


def check_rows_fit(sim: Simulation, num_bytes: float, key: str, value: int) -> bool:
    """Raise MemoryError if client states do not fit a device; asked once for each size.

    Args:
      num_bytes: of the states on each device.
      key, value: of the setting that they depend on.

    Returns:
      whether those of a further round may be there at the same time: both take half of
      what is free, at most.
    """
    fitting = sim.programs.run_whole.fitting
    if not num_bytes:
        return True
    if num_bytes in fitting:
        return fitting[num_bytes]
    free = free_bytes(sim.mesh)
    if free is not None and num_bytes > free:
        raise MemoryError(
            f"{key} must fit the devices' memory, got {value}: the client states need "
            f"{_gib(num_bytes)} on each, {_gib(free)} are free. Lower it."
        )
    fitting[num_bytes] = free is not None and 4 * num_bytes <= free
    return fitting[num_bytes]


@contextlib.contextmanager
def check_memory_on_call(sim: Simulation, run: Program) -> Iterator[Callable]:
    """Yield `run`, which raises on its first call if it needs more memory than is free.

    Raises:
      MemoryError: then, and when a device runs out of memory within the block, with
        the memory that `run` needs and the number of lanes that would fit.
    """
    needed = next(reversed(run.needs.values()), None)

    def call(*arguments):
        nonlocal needed
        shapes = tuple(x.shape for x in jax.tree.leaves(arguments))
        needed = run.needs.get(shapes)
        if needed is None:  # the call below uses this compiled program
            needed = run.lower(*arguments).compile().memory_analysis()
            free = free_bytes(sim.mesh)
            if needed is not None and free is not None:
                if sum(_after_collection(needed)) > free:
                    raise MemoryError(_memory_message(sim, needed, free))
            run.needs[shapes] = needed
        return run(*arguments)

    try:
        yield call
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        # Other processes may not have this error, and would not answer.
        free = free_bytes(sim.mesh) if jax.process_count() == 1 else None
        raise MemoryError(_memory_message(sim, needed, free)) from error


def _after_collection(needed) -> tuple[int, int]:
    """Bytes that a run needs besides its arguments: for results, and for training."""
    results = needed.output_size_in_bytes - needed.alias_size_in_bytes
    return max(results, 0), needed.temp_size_in_bytes


def _memory_message(sim, needed, free) -> str:
    """Describe the memory that a round needs, and how many lanes would fit."""
    if needed is None:
        return f"{_advice(sim)}."
    results, working = _after_collection(needed)
    text = (
        f"{_advice(sim)}: a round needs {_gib(needed.argument_size_in_bytes)} for its "
        f"arguments, {_gib(results)} for its results and {_gib(working)} to train"
    )
    if free is None:
        return f"{text}."
    lanes = sim.settings.clients_per_device
    # Memory that lanes share is divided among them, which underestimates one lane's.
    fits = min(int(lanes * max(free - results, 0) / max(working, 1)), lanes - 1)
    return (
        f"{text}, {_gib(free)} are free after the arguments: about {max(fits, 0)} fit."
    )


def _advice(sim) -> str:
    lanes = sim.settings.clients_per_device
    if sim.data.is_streamed:
        return (
            "clients_per_device and the stream's memory must fit the device, "
            f"got {lanes} and {sim.device_data.memory} bytes"
        )
    return f"clients_per_device must fit the device's memory, got {lanes}"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def size_of_call(sim: Simulation, max_rounds: int, num_tables: int = 1) -> StreamShape:
    """Size of a round's only segment in a call, whose table has those of all rounds.

    Args:
      num_tables: of a round, see `rounds.shared_tables`.

    Raises:
      ValueError: when the streamed examples of two calls do not fit.
    """
    settings, data = sim.settings, sim.data
    devices, lanes = sim.mesh.shape[meshes.CLIENTS], settings.clients_per_device
    waves = num_waves(sim.num_places, lanes, devices, settings.partial_sums)
    if not isinstance(data, StreamedData):
        return StreamShape(1, waves, 0)
    rows = int(sim.largest[: waves * lanes].sum())
    fits = data.dataset.memory // (2 * rows * data.dataset.example_bytes * num_tables)
    if max_rounds > fits:
        raise ValueError(
            f"rounds_per_call must be at most {max(fits, 1)}, so that the streamed "
            f"examples of two calls fit stream_buffer_gib, got {max_rounds}. Lower it, "
            "or raise stream_buffer_gib."
        )
    return StreamShape(1, waves, rows, 0)


def on_mesh(mesh: Mesh, tree: PyTree) -> PyTree:
    """ShapeDtypeStructs of `tree`, replicated on every device."""
    whole = meshes.replicated(mesh)
    struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
    return jax.tree.map(struct, tree)


def round_arguments(sim: Simulation, server: PyTree) -> tuple:
    """Arguments of `engine.Round.run_whole` as shapes, for `lower`.

    Args:
      server: arrays or placed shapes.

    Returns:
      (server, rows, slots, order, table, constants), shapes of rows and slots
      [A, w, L, ...], of order [K] and of the round.

    Raises:
      jax.errors.JAXTypeError: if the algorithm's `prepare` needs values.
    """
    mesh, lanes = sim.mesh, sim.settings.clients_per_device
    devices, table = mesh.shape[meshes.CLIENTS], sim.device_data
    row = jax.eval_shape(sim.algorithm.init_personal, jax.random.key(0), server)
    cohort, extra = before_round(sim, (), 0), empty_prepared(sim.num_places)
    if sim.algorithm.prepare:
        context = sim.context(cohort)
        if isinstance(table, Stream):
            examples = trees.shapes(table.example, table.num_examples)
            context = context._replace(dataset=examples)
        extra = trace_prepare(sim.algorithm, server, context, 0).extra
    waves = num_waves(sim.num_places, lanes, devices, sim.settings.partial_sums)
    may_miss = sim.settings.systems.has_participation
    has_participation = cohort.participation is not None or may_miss
    columns = jax.ShapeDtypeStruct((num_columns(has_participation),), jnp.int32)
    rows, slots = trees.shapes((row, columns), devices, waves, lanes)
    order = jax.ShapeDtypeStruct((sim.num_places,), jnp.int32)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    extra = extra._replace(num_added=())  # it is in the slots
    return (
        server,
        placed(rows, model_parallel.row_placement(mesh, rows)),
        placed(slots, meshes.over_clients(mesh)),
        on_mesh(mesh, order),
        table,
        RoundConstants(on_mesh(mesh, extra), on_mesh(mesh, number), sim.key, sim.hyper),
    )


def call_shapes(sim: Simulation, round_shapes: tuple, max_rounds: int) -> tuple:
    """Arguments of `Round.run_rounds` as shapes, for `lower`.

    Args:
      round_shapes: of `round_arguments`.
      max_rounds: n, rounds of a call.
    """
    server, rows, slots, order, table, constants = round_shapes
    if sim.data.is_streamed:
        size = size_of_call(sim, max_rounds)
        table = sim.data.shapes(size._replace(rows=max_rounds * size.rows))
    cut = NamedSharding(sim.mesh, P(None, meshes.CLIENTS))
    num_rows = min(max_rounds * sim.num_places, sim.population.num_clients)

    def row_shape(x):
        return jax.ShapeDtypeStruct((num_rows, *x.shape[3:]), x.dtype)

    slots, order = trees.shapes((slots, order), max_rounds)
    places = jax.ShapeDtypeStruct(slots.shape[:-1], slots.dtype)
    slots, places = placed((slots, places), (cut, cut))
    inputs = CallInputs(slots, places, on_mesh(sim.mesh, order))
    rows = on_mesh(sim.mesh, jax.tree.map(row_shape, rows))
    return server, rows, constants.round, inputs, table, constants
