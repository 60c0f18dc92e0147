"""Many rounds in one call of a compiled program.

Cohorts and schedules are functions of (seed, round), so that the host knows those of n
rounds before the first is trained. The personal rows of all their clients are on the
devices, where each round updates those of its cohort; the store gets each row once, at
the end of the call.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.federated.calls import (
    CallKind,
    Dispatched,
    Reading,
    RunInputs,
    region,
    round_log,
    schedule_cohort,
    shared_tables,
)
from fedfr_jax.federated.client import column
from fedfr_jax.federated.engine import CallInputs, RoundConstants, empty_prepared
from fedfr_jax.federated.pipeline import Ahead, Alone, work_during
from fedfr_jax.federated.programs import (
    check_memory_on_call,
    check_rows_fit,
    size_of_call,
)
from fedfr_jax.federated.round_checks import check_finite, check_rows
from fedfr_jax.federated.state import RoundLog, Runs, Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.streaming import RoundInputs
from fedfr_jax.types import Cohort, PyTree


def check_call_rows(
    runs: Runs, stores: Sequence[Store], max_rounds: int, cohorts: Sequence[Cohort]
) -> bool:
    """`CallKind.check_rows`: every device has the rows of all clients of a call."""
    del cohorts
    sim = runs.sims[0]
    num_bytes = sum(trees.num_bytes(store.template) for store in stores)
    num_bytes *= num_call_rows(sim, max_rounds)
    return check_rows_fit(sim, num_bytes, "rounds_per_call", max_rounds)


def num_call_rows(sim: Simulation, max_rounds: int) -> int:
    """Number of client states that a call has, U."""
    return min(max_rounds * sim.num_places, sim.population.num_clients)


class HostCall(NamedTuple):
    """A run's part in a call of `len(cohorts)` rounds, at most n, in host memory."""

    cohorts: list[Cohort]
    works: list[RoundInputs]
    ids: np.ndarray  # [C] int64 clients of all rounds, ascending
    rows: PyTree  # [U, ...] of these clients, padded with zeros
    inputs: CallInputs  # [n, ...], padded with zeros


class LoadedCall(NamedTuple):
    """Inputs of a call of all runs, on the devices."""

    calls: list[HostCall]  # of the runs
    rows: PyTree  # on the host unless `has_rows`
    count: PyTree
    inputs: CallInputs
    table: PyTree
    constants: RoundConstants
    has_rows: bool
    prepare_seconds: float = 0.0


def read_calls(reading: Reading) -> Iterator[LoadedCall]:
    """Yield each call."""
    for first, _, parts in reading.inputs():
        yield load_call(reading, first, parts)


def load_call(reading: Reading, first: int, parts: Sequence[RunInputs]) -> LoadedCall:
    """Schedule the rounds, load the states and examples of all their clients.

    Raises:
      ValueError: when streamed examples do not fit.
    """
    runs, max_rounds = reading.runs, reading.max_rounds
    sim, count = runs.sims[0], len(parts[0].cohorts)
    works = [
        [
            schedule_cohort(part.sim, cohort, empty_prepared(len(cohort.ids)))
            for cohort in part.cohorts
        ]
        for part in parts
    ]
    tables = shared_tables(runs, [of_run[0] for of_run in works])
    num_tables = max(tables) + 1  # of a round
    size = size_of_call(sim, max_rounds, num_tables)
    for of_run, table in zip(works, tables, strict=True):
        for i, work in enumerate(of_run):
            place = (i * num_tables + table) * size.rows
            of_run[i] = sim.data.in_segments(work, size, place)
    calls = [
        host_call(part, of_run, first, max_rounds)
        for part, of_run in zip(parts, works, strict=True)
    ]
    readers = [
        works[tables.index(table)][i]
        for i in range(count)
        for table in range(num_tables)
    ]
    no_rows = lambda i: ()
    segments = sim.data.segments(size, no_rows, readers, max_rounds * num_tables)
    return put_call(runs, calls, first, next(segments)[0], reading.is_roomy)


def host_call(
    part: RunInputs, works: list[RoundInputs], first: int, max_rounds: int
) -> HostCall:
    """Load the states of all clients of a run's rounds."""
    slots = np.stack([x.slots for x in works])
    clients = column(slots, "client")
    is_idle = clients < 0
    ids = np.unique(clients)
    ids = ids[ids >= 0].astype(np.int64)
    num_rows = num_call_rows(part.sim, max_rounds)
    with region("gather"):
        count = jax.process_count()  # each of which loads them all
        processes = np.repeat(np.arange(count), len(ids))
        rows, is_new = part.rows.gather(first, ids, np.tile(ids, count), processes)
    places = np.searchsorted(ids, clients).astype(np.int32)
    set_new(column(slots, "is_new"), np.where(is_idle, len(ids), places), is_new)
    inputs = CallInputs(
        slots=slots,
        rows=np.where(is_idle, np.int32(num_rows), places),
        order=np.stack([x.order for x in works]),
    )
    return HostCall(
        cohorts=part.cohorts,
        works=works,
        ids=ids,
        rows=jax.tree.map(lambda x: pad_rows(x, num_rows), rows),
        inputs=jax.tree.map(lambda x: pad_rows(x, max_rounds), inputs),
    )


def set_new(flags: np.ndarray, places: np.ndarray, is_new: np.ndarray) -> None:
    """Set in `flags` [count, A, w, L] which clients have no state before a round.

    Args:
      places: like `flags`, each slot's client among C; C where it is idle.
      is_new: [C] before the call.
    """
    is_new = np.append(is_new, True)
    for round_flags, round_places in zip(flags, places, strict=True):
        round_flags[:] = is_new[round_places]
        is_new[round_places] = False
        is_new[-1] = True


def pad_rows(x: np.ndarray, size: int) -> np.ndarray:
    """Pad `x` [m, ...] with zeros to [size, ...]."""
    if len(x) == size:
        return x
    return np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)])


def put_call(
    runs: Runs, calls: list[HostCall], first: int, table: PyTree, has_rows: bool
) -> LoadedCall:
    """Put a call on the devices; its rows only if `has_rows`."""
    mesh = runs.sims[0].mesh
    whole = meshes.replicated(mesh)
    cut = NamedSharding(mesh, P(None, meshes.CLIENTS))
    inputs = [call.inputs for call in calls]
    slots = runs.join_slots([x.slots for x in inputs], 2)
    places = runs.join([x.rows for x in inputs], 2)
    order = runs.join([x.order for x in inputs], 1)
    slots, places = meshes.put_numbers((slots, places), cut)
    # The slots have the numbers of added examples.
    extras = [call.works[0].added._replace(num_added=()) for call in calls]
    count = np.int32(len(calls[0].cohorts))
    numbers = count, order, runs.join_extras(extras), np.int32(first)
    count, order, extra, number = meshes.put_numbers(numbers, whole)
    rows = runs.join([call.rows for call in calls])
    return LoadedCall(
        calls=[call._replace(rows=(), inputs=CallInputs((), (), ())) for call in calls],
        rows=meshes.put_global(rows, whole) if has_rows else rows,
        count=count,
        inputs=CallInputs(slots, places, order),
        table=table,
        constants=RoundConstants(extra, number, runs.key, runs.hyper),
        has_rows=has_rows,
    )


def train_call(
    runs: Runs, servers: PyTree, ahead: Ahead | Alone, work: Callable[[], None] | None
) -> tuple[Dispatched, float]:
    """`CallKind.train`. `rows` are [U, ...], `metrics` [n, K], `is_finite` [n].

    Of a sweep's members rows are [S, U, ...] and metrics [n, S, K].

    Raises:
      MemoryError: when it does not fit a device, see `check_memory_on_call`.
    """
    loaded, sim = ahead.take(), runs.sims[0]
    rows = loaded.rows
    if not loaded.has_rows:
        rows = meshes.put_global(rows, meshes.replicated(sim.mesh))
    with check_memory_on_call(sim, runs.programs.run_rounds) as run:
        servers, *results = run(
            servers, rows, loaded.count, loaded.inputs, loaded.table, loaded.constants
        )
        loaded = loaded._replace(rows=(), inputs=CallInputs((), (), ()), table=())
        trained = Dispatched(loaded, servers, *meshes.replicate(results))
        return trained, work_during(trained.is_finite, work)


def finish_call(
    runs: Runs, stores: Sequence[Store], trained: Dispatched
) -> tuple[PyTree, list[list[RoundLog]]]:
    """`CallKind.finish`: check the rounds' numbers in order, then store the states."""
    with check_memory_on_call(runs.sims[0], runs.programs.run_rounds):
        results = jax.device_get((trained.rows, trained.metrics, trained.is_finite))
    rows, metrics, is_finite = results
    parts, logs = zip(runs.sims, stores, trained.loaded.calls, strict=True), []
    for s, (sim, store, call) in enumerate(parts):
        numbers = runs.member(rows, s), runs.member(metrics, s, 1), is_finite
        logs.append(store_call(sim, store, call, *numbers))
    return trained.servers, logs


def store_call(
    sim: Simulation,
    store: Store,
    call: HostCall,
    rows: PyTree,
    metrics: dict,
    is_finite: np.ndarray,
) -> list[RoundLog]:
    """Check the rounds' numbers in order, then pass the client states to the store.

    Args:
      rows, metrics, is_finite: of `train_call`, of this run, on the host.
    """
    logs, rounds = [], np.full(len(call.ids), -1)
    for i, (cohort, work) in enumerate(zip(call.cohorts, call.works, strict=True)):
        of_round = {name: x[i] for name, x in metrics.items()}
        log = round_log(sim, cohort, work, of_round)
        check_finite(is_finite[i], f"round {cohort.round + 1}")
        logs.append(log)
        clients = column(work.slots, "client")
        trained = np.searchsorted(call.ids, clients[clients >= 0])
        rounds[trained] = cohort.round
    rows = jax.tree.map(lambda x: x[: len(call.ids)], rows)
    check_rows(rows, call.ids, call.cohorts[-1].round)
    owners = np.arange(len(call.ids)) % jax.process_count()  # each writes its part
    mine = owners == jax.process_index()
    rows = jax.tree.map(lambda x: x[mine], rows) if not mine.all() else rows
    rounds = np.concatenate([rounds[mine], rounds[~mine]])
    store.scatter(call.ids[mine], rows, rounds, call.ids[~mine], owners[~mine])
    return logs


MANY_ROUNDS = CallKind(check_call_rows, read_calls, train_call, finish_call)
