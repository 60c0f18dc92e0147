"""Whether a round fits a device: asked before it compiles and before it first runs.

Before the first compile only the least that a round can need is known: its personal
rows, and a network of its own for each lane. The compiler then tells what else a round
takes; what lies on the device already (server, table, arguments) is in use and not
asked for again. The devices of a CPU share what the machine has available, and so do
the processes of a run that are on one machine. All processes ask together, and what one
of them lacks all are refused: else the others would wait for it for ever.
"""

import contextlib
from collections.abc import Callable, Iterator

import jax

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.devices import free_bytes, is_out_of_memory
from fedfr_jax.federated.compiling import Program, lowered
from fedfr_jax.federated.state import Simulation
from fedfr_jax.types import PyTree

MIB, GIB = 2**20, 2**30


def check_memory(sim: Simulation, server: PyTree, rows: PyTree) -> None:
    """Raise MemoryError when a round cannot fit.

    What was let through before, lanes and shapes of rows, is not asked for again.

    Args:
      sim: its table and `server` are on the devices already.
      rows: personal rows of this process' shards, three axes in front of their own.
    """
    known = sim.programs.whole.fitting
    asked = sim.lanes, *(x.shape for x in jax.tree.leaves(rows))
    if asked not in known:
        _check_least(sim, server, rows)
        known.add(asked)


def _check_least(sim, server, rows):
    free = free_bytes(sim.mesh)
    if free is None:
        return
    # A stream's rows come and go with its segments.
    fixed = trees.num_bytes(rows) / len(sim.mesh.local_devices)
    fixed = 0 if sim.source.is_streamed else fixed
    if fixed > free:
        raise MemoryError(
            f"cohort_size must fit the devices' memory, got {sim.cohort_size}: the "
            f"personal rows need {_gib(fixed)} on each, {_gib(free)} are free."
        )
    num_shards = sim.mesh.shape[meshes.MODEL]
    if fixed + sim.lanes * trees.num_bytes(server) / num_shards <= free:
        return
    # A server may hold more than a lane trains: several networks, or momentum.
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[3:], x.dtype), rows)
    network = jax.eval_shape(sim.algorithm.personalize, server, row)
    per_lane = trees.num_bytes(network) / num_shards
    needed = fixed + sim.lanes * per_lane
    if needed > free:
        fits = int((free - fixed) / per_lane)
        raise MemoryError(
            f"{_knobs(sim)}: a round needs at least {_gib(needed)}, {_gib(free)} are "
            f"free: {_fitting('at most', fits, fixed + per_lane)}"
        )


@contextlib.contextmanager
def guarded(sim: Simulation, run: Program) -> Iterator[Callable]:
    """Yield `run`, refused on its first call if it needs more than is free.

    Raises:
      MemoryError: then, and when a device runs out of memory within the block: says
        what `run` needs and how many lanes would fit.
    """
    needed = None

    def call(*arguments):
        nonlocal needed
        shapes = tuple(x.shape for x in jax.tree.leaves(arguments))
        needed = run.needs.get(shapes)
        if needed is None:  # compiled here, for the call below too
            needed = lowered(run, *arguments).compile().memory_analysis()
            free = free_bytes(sim.mesh)
            if None not in (needed, free) and sum(_fresh(needed)) > free:
                raise MemoryError(_says(sim, needed, free))
            run.needs[shapes] = needed
        return run(*arguments)

    try:
        yield call
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        # The others of a run may be elsewhere, and cannot be asked what they have.
        free = free_bytes(sim.mesh) if jax.process_count() == 1 else None
        raise MemoryError(_says(sim, needed, free)) from error


def _fresh(needed) -> tuple[int, int]:
    """Bytes that a run takes beside its arguments: for its results, and to train."""
    results = needed.output_size_in_bytes - needed.alias_size_in_bytes
    return max(results, 0), needed.temp_size_in_bytes


def _says(sim, needed, free) -> str:
    """What a round needs on a device, and how many lanes would fit."""
    if needed is None:
        return f"{_knobs(sim)}."
    results, working = _fresh(needed)
    says = (
        f"{_knobs(sim)}: a round needs {_gib(needed.argument_size_in_bytes)} for its "
        f"arguments, {_gib(results)} for its results and {_gib(working)} to train"
    )
    if free is None:
        return f"{says}."
    # What lanes share counts for each of them here, so that one lane needs no less.
    fits = int(sim.lanes * max(free - results, 0) / max(working, 1))
    fitting = _fitting("about", min(fits, sim.lanes - 1), results + working / sim.lanes)
    return f"{says}, {_gib(free)} are free beside the arguments: {fitting}"


def _knobs(sim) -> str:
    if sim.source.is_streamed:
        return (
            "lanes and the stream's memory must fit the device, "
            f"got {sim.lanes} and {sim.table.memory} bytes"
        )
    return f"lanes must fit the device's memory, got {sim.lanes}"


def _fitting(how: str, lanes: int, one: float) -> str:
    if lanes < 1:
        return f"not even one lane fits, which needs at least {_gib(one)}."
    return f"{how} {lanes} {'lane fits' if lanes == 1 else 'lanes fit'}."


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
