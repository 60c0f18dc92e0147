"""Programs of a round: lowering from shapes, and device memory checks.

Before the first compile only a lower bound of a round's memory is known: its client
states, and a model for each lane. The compiler then reports what else a round needs;
what is on the device already (server, examples, arguments) is not counted again. The
devices of a CPU share the machine's free memory, and so do the processes of a run on
one machine. All processes check together, and a lack in one of them is an error in all,
because the others would wait for it forever.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.federated import model_parallel
from fedfr_jax.federated.client import num_columns
from fedfr_jax.federated.engine import Program
from fedfr_jax.federated.schedule import build_schedule
from fedfr_jax.federated.state import Simulation
from fedfr_jax.mesh import free_bytes, is_out_of_memory
from fedfr_jax.mesh import shapes_at as placed
from fedfr_jax.types import Prepared, PyTree, RoundContext

MIB, GIB = 2**20, 2**30


def check_memory(sim: Simulation, server: PyTree, rows: PyTree) -> None:
    """Raise MemoryError if a round cannot fit; once for each shape of rows and lanes.

    Args:
      sim: its table and `server` are on the devices already.
      rows: client states of this process' devices, three axes in front of their own.
    """
    lanes, fitting = sim.settings.clients_per_device, sim.programs.run_whole.fitting
    shapes = lanes, *(x.shape for x in jax.tree.leaves(rows))
    if shapes not in fitting:
        if (free := free_bytes(sim.mesh)) is not None:
            _check_lower_bound(sim, server, rows, free)
        fitting.add(shapes)


def _check_lower_bound(sim, server, rows, free):
    lanes, num_devices = sim.settings.clients_per_device, len(sim.mesh.local_devices)
    # Of a stream the rows of one segment are on the devices.
    fixed = 0.0 if sim.data.is_streamed else trees.num_bytes(rows) / num_devices
    # A server may hold more than a lane trains: several networks, or momentum.
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[3:], x.dtype), rows)
    network = jax.eval_shape(sim.algorithm.personalize, server, row)
    per_lane = trees.num_bytes(network) / sim.mesh.shape[meshes.MODEL]
    if fixed > free:
        raise MemoryError(
            "cohort_size must fit the devices' memory, got "
            f"{sim.settings.cohort_size}: the personal rows need {_gib(fixed)} on "
            f"each, {_gib(free)} are free."
        )
    if (needed := fixed + lanes * per_lane) > free:
        fits = _fitting_lanes(int((free - fixed) / per_lane), fixed + per_lane)
        raise MemoryError(
            f"{_advice(sim)}: a round needs at least {_gib(needed)}, {_gib(free)} are "
            f"free: {fits}"
        )


@contextlib.contextmanager
def check_memory_on_call(sim: Simulation, run: Program) -> Iterator[Callable]:
    """Yield `run`, which raises on its first call if it needs more memory than is free.

    Raises:
      MemoryError: then, and when a device runs out of memory within the block, with
        the memory that `run` needs and the number of lanes that would fit.
    """
    needed = None

    def call(*arguments):
        nonlocal needed
        shapes = tuple(x.shape for x in jax.tree.leaves(arguments))
        needed = run.needs.get(shapes)
        if needed is None:  # the call below uses this compiled program
            needed = lowered(run, *arguments).compile().memory_analysis()
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
    fits = _fitting_lanes(fits, results + working / lanes)
    return f"{text}, {_gib(free)} are free after the arguments: {fits}"


def _advice(sim) -> str:
    lanes = sim.settings.clients_per_device
    if sim.data.is_streamed:
        return (
            "clients_per_device and the stream's memory must fit the device, "
            f"got {lanes} and {sim.device_data.memory} bytes"
        )
    return f"clients_per_device must fit the device's memory, got {lanes}"


def _fitting_lanes(lanes: int, lane_bytes: float) -> str:
    if lanes < 1:
        return f"not even one lane fits, which needs at least {_gib(lane_bytes)}."
    return f"about {lanes} {'lane fits' if lanes == 1 else 'lanes fit'}."


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def lowered(run: Program, *arguments) -> jax.stages.Lowered:
    """`run.lower(*arguments)` without garbage collection, which saves time."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        return run.lower(*arguments)
    finally:
        if is_on:
            gc.enable()


def extra_shapes(
    prepare: Callable, server: PyTree, context: RoundContext
) -> Prepared | None:
    """`Prepared` of a cohort as ShapeDtypeStructs on the mesh; None if it needs values.

    Args:
      prepare: of an `Algorithm`.
      server: arrays or shapes, like the resident data set of `context`.
    """

    def prepare_traced(server, dataset):
        return prepare(server, context._replace(dataset=dataset))

    try:
        extra = jax.eval_shape(prepare_traced, server, context.dataset)
    except jax.errors.JAXTypeError:
        return None
    return on_mesh(context.mesh, extra)


def on_mesh(mesh: Mesh, tree: PyTree) -> PyTree:
    """ShapeDtypeStructs of `tree`, replicated on every device."""
    whole = meshes.replicated(mesh)
    struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
    return jax.tree.map(struct, tree)


def round_arguments(
    sim: Simulation,
    *,
    cohort_size: int,
    server: PyTree,
    row: PyTree,
    extra: Prepared,
    table: PyTree,
    has_participation: bool = False,
) -> tuple:
    """Arguments of `engine.Round.run_whole` as shapes, for `lower`.

    Args:
      cohort_size: K of the round.
      row: one client's personal state, arrays or shapes.
      server, extra, table: as the round gets them, arrays or placed shapes.
      has_participation: clients of the cohort may be absent.

    Returns:
      (server, rows, slots, order, table, shared), shapes of rows and slots
      [A, w, L, ...], of order [K] and of the round.
    """
    mesh, lanes = sim.mesh, sim.settings.clients_per_device
    devices = mesh.shape[meshes.CLIENTS]
    plan = build_schedule(
        np.ones(cohort_size, np.int64),
        num_devices=devices,
        lanes=lanes,
        shards=sim.settings.partial_sums,
    )
    waves = plan.slots.size // (devices * lanes)
    columns = jax.ShapeDtypeStruct((num_columns(has_participation),), jnp.int32)
    rows, slots = trees.shapes((row, columns), devices, waves, lanes)
    order = jax.ShapeDtypeStruct((cohort_size,), jnp.int32)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    extra = extra._replace(num_added=())  # it is in the slots
    return (
        server,
        placed(rows, model_parallel.row_placement(mesh, rows)),
        placed(slots, meshes.over_clients(mesh)),
        on_mesh(mesh, order),
        table,
        (extra, on_mesh(mesh, number), sim.key, sim.hyper),
    )
