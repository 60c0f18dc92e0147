"""Programs of a round: lowering from shapes, and device memory checks.

Before the first compile only a lower bound of a round's memory is known: its client
states, and a model for each lane. The compiler then reports what else a round needs;
what is on the device already (server, examples, arguments) is not counted again. The
devices of a CPU share the machine's free memory, and so do the processes of a run on
one machine. All processes check together, and a lack in one of them is an error in all,
because the others would wait for it forever.

Shapes do not depend on what the server prepares for a cohort, so the first round is
compiled on another thread during the preparation.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.federated import model_parallel
from fedfr_jax.federated.client import num_columns
from fedfr_jax.federated.lowering import Program, lowered
from fedfr_jax.federated.schedule import build_schedule
from fedfr_jax.federated.state import Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.mesh import free_bytes, is_out_of_memory
from fedfr_jax.mesh import shapes_at as placed
from fedfr_jax.types import Cohort, Prepared, PyTree, RoundContext

MIB, GIB = 2**20, 2**30


def check_memory(sim: Simulation, server: PyTree, rows: PyTree) -> None:
    """Raise MemoryError if a round cannot fit; once for each shape of rows and lanes.

    Args:
      sim: its table and `server` are on the devices already.
      rows: personal rows of this process' shards, three axes in front of their own.
    """
    fitting = sim.programs.run_whole.fitting
    shapes = sim.clients_per_device, *(x.shape for x in jax.tree.leaves(rows))
    if shapes not in fitting:
        _check_lower_bound(sim, server, rows)
        fitting.add(shapes)


def _check_lower_bound(sim, server, rows):
    free = free_bytes(sim.mesh)
    if free is None:
        return
    fixed = 0.0
    if not sim.data.is_streamed:  # there the rows of one segment are on the devices
        fixed = trees.num_bytes(rows) / len(sim.mesh.local_devices)
    if fixed > free:
        raise MemoryError(
            f"cohort_size must fit the devices' memory, got {sim.cohort_size}: the "
            f"personal rows need {_gib(fixed)} on each, {_gib(free)} are free."
        )
    num_shards = sim.mesh.shape[meshes.MODEL]
    if fixed + sim.clients_per_device * trees.num_bytes(server) / num_shards <= free:
        return
    # A server may hold more than a lane trains: several networks, or momentum.
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[3:], x.dtype), rows)
    network = jax.eval_shape(sim.algorithm.personalize, server, row)
    per_lane = trees.num_bytes(network) / num_shards
    needed = fixed + sim.clients_per_device * per_lane
    if needed > free:
        fits = int((free - fixed) / per_lane)
        raise MemoryError(
            f"{_advice(sim)}: a round needs at least {_gib(needed)}, {_gib(free)} are "
            f"free: {_max_fitting('at most', fits, fixed + per_lane)}"
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
            if None not in (needed, free) and sum(_after_collection(needed)) > free:
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
    # Memory that lanes share is divided among them, which underestimates one lane's.
    fits = int(sim.clients_per_device * max(free - results, 0) / max(working, 1))
    fitting = _max_fitting(
        "about",
        min(fits, sim.clients_per_device - 1),
        results + working / sim.clients_per_device,
    )
    return f"{text}, {_gib(free)} are free after the arguments: {fitting}"


def _advice(sim) -> str:
    if sim.data.is_streamed:
        return (
            "clients_per_device and the stream's memory must fit the device, "
            f"got {sim.clients_per_device} and {sim.device_data.memory} bytes"
        )
    return (
        f"clients_per_device must fit the device's memory, got {sim.clients_per_device}"
    )


def _max_fitting(qualifier: str, lanes: int, lane_bytes: float) -> str:
    if lanes < 1:
        return f"not even one lane fits, which needs at least {_gib(lane_bytes)}."
    return f"{qualifier} {lanes} {'lane fits' if lanes == 1 else 'lanes fit'}."


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


@contextlib.contextmanager
def compile_in_background(
    sim: Simulation, server: PyTree, store: Store, cohort: Cohort
) -> Iterator[None]:
    """Compile the round of `sim` while the block prepares `cohort`.

    Only for the first block, which ends when both are done, even if it fails. Nothing
    is compiled without a `prepare` that JAX can trace, for a stream, whose shapes are
    known when it is read, and in a run of several processes. A compiler error is
    raised when the round is called.
    """
    arguments = _arguments(sim, server, store, cohort)
    if arguments is None:
        yield
        return
    check_memory(sim, server, arguments[1])
    sim.programs.run_whole.is_begun = True
    # First, as it takes longer than the preparation, and XLA's passes use one core.
    program = lowered(sim.programs.run_whole, *arguments)
    with ThreadPoolExecutor(1, "compile") as thread:
        thread.submit(program.compile)
        yield


def _arguments(sim, server, store, cohort):
    """`round_arguments` of a round to be compiled here, else None."""
    is_known = sim.programs.run_whole.is_begun or sim.data.is_streamed
    if is_known or not sim.algorithm.prepare or jax.process_count() > 1:
        return None
    extra = extra_shapes(sim.algorithm.prepare, server, sim.context(cohort))
    if extra is None:
        sim.programs.run_whole.is_begun = True
        return None
    return round_arguments(
        sim.mesh,
        cohort_size=len(cohort.ids),
        lanes=sim.clients_per_device,
        shards=sim.num_partial_sums,
        server=server,
        row=store.template,
        extra=extra,
        table=sim.device_data,
        key=sim.key,
        hyper=sim.hyper,
        has_participation=cohort.participation is not None,
    )


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
    mesh: Mesh,
    *,
    cohort_size: int,
    lanes: int,
    shards: int | None,
    server: PyTree,
    row: PyTree,
    extra: Prepared,
    table: PyTree,
    key: jax.Array,
    hyper: PyTree = (),
    has_participation: bool = False,
) -> tuple:
    """Arguments of `engine.Round.run_whole` as shapes, for `lower`.

    Args:
      cohort_size, lanes, shards: K, L and V (None: a shard per device).
      row: one client's personal state, arrays or shapes.
      server, extra, table, key, hyper: as the round gets them, arrays or placed shapes.
      has_participation: clients of the cohort may be absent.

    Returns:
      (server, rows, slots, order, table, shared), shapes of rows and slots
      [A, w, L, ...], of order [K] and of the round.
    """
    devices = mesh.shape[meshes.CLIENTS]
    plan = build_schedule(
        np.ones(cohort_size, np.int64), num_devices=devices, lanes=lanes, shards=shards
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
        (extra, on_mesh(mesh, number), key, hyper),
    )
