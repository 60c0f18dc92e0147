"""One round in a call, in segments."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.federated.calls import (
    CallKind,
    Dispatched,
    Reading,
    region,
    round_log,
    schedule_cohort,
    shared_tables,
    slot_processes,
)
from fedfr_jax.federated.client import column
from fedfr_jax.federated.engine import RoundConstants, empty_prepared
from fedfr_jax.federated.model_parallel import row_placement
from fedfr_jax.federated.participation import after_round
from fedfr_jax.federated.pipeline import Ahead, Alone, CohortRows, work_during
from fedfr_jax.federated.programs import check_memory_on_call, check_rows_fit
from fedfr_jax.federated.round_checks import (
    are_states_finite,
    check_finite,
    check_rows,
    is_state_finite,
)
from fedfr_jax.federated.schedule import num_waves
from fedfr_jax.federated.state import RoundLog, Runs, Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.streaming import RoundInputs
from fedfr_jax.types import Cohort, PyTree


def check_round_rows(
    runs: Runs, stores: Sequence[Store], max_rounds: int, cohorts: Sequence[Cohort]
) -> bool:
    """`CallKind.check_rows`; of a stream the rows of a segment are on the devices."""
    del max_rounds
    sim = runs.sims[0]
    if sim.data.is_streamed:
        return True
    settings, devices = sim.settings, sim.mesh.shape[meshes.CLIENTS]
    count = len(cohorts[0].ids) if cohorts else sim.num_places
    lanes = settings.clients_per_device
    waves = num_waves(count, lanes, devices, settings.partial_sums)
    num_bytes = sum(trees.num_bytes(store.template) for store in stores)
    num_bytes *= waves * lanes / sim.mesh.shape[meshes.MODEL]
    return check_rows_fit(sim, num_bytes, "cohort_size", settings.cohort_size)


def read_rounds(reading: Reading) -> Iterator[tuple["LoadedRound", tuple]]:
    """Yield each segment of each round, with the round."""
    runs = reading.runs
    data = runs.sims[0].data
    for round, _, parts in reading.inputs():
        begin = time.perf_counter()
        data.input_wait()  # forgets what others have waited for
        works = [assign(*part) for part in parts]
        prepared = time.perf_counter() - begin - data.input_wait()
        is_prepared = runs.sims[0].algorithm.prepare is not None
        loaded = load_round(runs, works, round, reading.is_roomy)
        segments, loaded = (
            loaded.segments,
            loaded._replace(
                works=[work._replace(rows=()) for work in loaded.works],
                segments=iter(()),
                cohorts=[part.cohorts[0] for part in parts],
                prepare_seconds=prepared if is_prepared else 0.0,
            ),
        )
        del works
        # Not by a loop, whose variable would keep a segment while the next is read.
        yield from map(functools.partial(_with, loaded), segments)
        del segments, loaded


def _with(loaded, segment):
    return loaded, segment


def assign(
    sim: Simulation, server: PyTree, cohorts: Sequence[Cohort], rows: CohortRows
) -> RoundInputs:
    """Prepare and schedule the cohort of a round, and load its client states."""
    (cohort,) = cohorts
    extra = empty_prepared(len(cohort.ids))
    if sim.algorithm.prepare:
        with region("prepare"):
            extra = sim.algorithm.prepare(server, sim.context(cohort))
            extra = extra._replace(num_added=meshes.fetch(extra.num_added))
    work = schedule_cohort(sim, cohort, extra)
    local, clients = meshes.local_shards(sim.mesh), column(work.slots, "client")
    ids, everyone = clients[local], clients.reshape(-1)
    processes = slot_processes(sim, clients).reshape(-1)
    with region("gather"):
        states, is_new = rows.gather(cohort.round, ids.reshape(-1), everyone, processes)
    column(work.slots, "is_new")[local] = is_new.reshape(ids.shape)
    return work._replace(
        rows=jax.tree.map(lambda x: x.reshape(ids.shape + x.shape[1:]), states)
    )


class LoadedRound(NamedTuple):
    """Inputs of a round of all runs, on the devices once a segment is asked for."""

    works: list[RoundInputs]  # of the runs, in whole segments
    segments: Iterator[tuple[PyTree, ...]]  # (rows, slots, table) of each
    num_segments: int  # of 1, one call trains the round
    order: PyTree
    constants: RoundConstants
    has_rows: bool  # segments have their rows on the devices, not on the host
    cohorts: Sequence[Cohort] = ()  # of the runs
    prepare_seconds: float = 0.0  # that devices worked while the round was read


def load_round(
    runs: Runs, works: Sequence[RoundInputs], round: int, has_rows: bool = True
) -> LoadedRound:
    """Cut one round of all runs into segments, loaded as they are asked for."""
    sim, tables = runs.sims[0], shared_tables(runs, works)
    mesh, data, num_tables = sim.mesh, sim.data, max(tables) + 1
    size = data.size_of(works, sim.largest, num_tables)
    works = [
        data.in_segments(work, size, table * size.rows)
        for work, table in zip(works, tables, strict=True)
    ]
    # The slots have the numbers of added examples.
    extras = [work.added._replace(num_added=()) for work in works]
    if size.room is not None:
        extras = [x._replace(added_rows=x.added_rows[:, : size.room]) for x in extras]
    orders = [work.order for work in works]
    numbers = runs.join(orders), runs.join_extras(extras), np.int32(round)
    order, extra, number = meshes.put_numbers(numbers, meshes.replicated(mesh))
    cut = meshes.over_clients(mesh)

    def load(i):
        waves = slice(i * size.waves, (i + 1) * size.waves)
        of_waves = lambda tree: jax.tree.map(lambda x: x[:, waves], tree)
        rows = runs.join([of_waves(work.rows) for work in works], 1)
        slots = runs.join_slots([of_waves(work.slots) for work in works], 1)
        rows = put_rows(runs, rows) if has_rows else rows
        return rows, meshes.put_numbers(slots, cut)

    readers = [works[tables.index(table)] for table in range(num_tables)]
    segments = data.segments(size, load, readers, num_tables)
    constants = RoundConstants(extra, number, runs.key, runs.hyper)
    return LoadedRound(works, segments, size.segments, order, constants, has_rows)


def put_rows(runs: Runs, rows: PyTree) -> PyTree:
    """Put a segment's client states on the devices of their clients."""
    mesh = runs.sims[0].mesh
    places = row_placement(mesh, rows, is_stacked=runs.is_sweep)
    return meshes.put_local(rows, places, mesh.shape[meshes.CLIENTS])


def train_round(
    runs: Runs, servers: PyTree, ahead: Ahead | Alone, work: Callable[[], None] | None
) -> tuple[Dispatched, float]:
    """`CallKind.train`: segment by segment. `rows` are lists of those of segments."""
    loaded, segment = ahead.take()
    sim, programs = runs.sims[0], runs.programs
    if loaded.num_segments == 1:
        with check_memory_on_call(sim, programs.run_whole) as whole:
            rows, slots, table = segment
            rows = rows if loaded.has_rows else put_rows(runs, rows)
            servers, rows, metrics = whole(
                servers, rows, slots, loaded.order, table, loaded.constants
            )
            del segment, slots, table
            trained = dispatched(runs, loaded, servers, [rows], metrics)
            return trained, work_during(trained.is_finite, work)
    late, total, outputs, rows = 0.0, None, [], []
    with check_memory_on_call(sim, programs.run) as run:
        for _ in range(loaded.num_segments):
            segment = segment or ahead.take()[1]
            arguments = *segment, loaded.constants
            if total is None:
                total = programs.start(servers, *arguments)
            total, output = run(total, servers, *arguments)
            # Those of the segment before are fetched while this one trains.
            rows[-1:] = meshes.fetch_local(rows[-1:])
            rows.append(output.personal)
            outputs.append(output._replace(personal=()))
            # To its end, so that at most two tables exist.
            late += work_during(output.weight, work)
            work = None
            segment = arguments = None
        inputs = total, outputs, loaded.order, loaded.constants
        servers, metrics = programs.finish(servers, *inputs)
        trained = dispatched(runs, loaded, servers, rows, metrics)
        jax.block_until_ready(trained.is_finite)
    return trained, late


def dispatched(
    runs: Runs, loaded: LoadedRound, servers: PyTree, rows: list, metrics: dict
) -> Dispatched:
    """Begin what is asked of the results, before the devices get the next round."""
    is_finite = (
        are_states_finite(servers) if runs.is_sweep else [is_state_finite(servers)]
    )
    return Dispatched(loaded, servers, rows, meshes.replicate(metrics), is_finite)


def finish_round(
    runs: Runs, stores: Sequence[Store], trained: Dispatched
) -> tuple[PyTree, list[list[RoundLog]]]:
    """`CallKind.finish`: check the numbers of a round, and store its client states."""
    loaded, sim = trained.loaded, runs.sims[0]
    with check_memory_on_call(sim, runs.programs.run_whole):
        last = meshes.fetch_local(trained.rows[-1])
        metrics, is_finite = jax.device_get((trained.metrics, trained.is_finite))
    waves = 2 if runs.is_sweep else 1  # their axis
    rows = jax.tree.map(
        lambda *x: np.concatenate(x, axis=waves) if x[1:] else x[0],
        *trained.rows[:-1],
        last,
    )
    logs = []
    parts = zip(runs.sims, stores, loaded.cohorts, loaded.works, strict=True)
    for s, (member, store, cohort, work) in enumerate(parts):
        logs.append(round_log(member, cohort, work, runs.member(metrics, s)))
        check_finite(is_finite[s], f"round {cohort.round + 1}")
        store_rows(member, store, work, runs.member(rows, s, 1), cohort.round)
    servers = after_round(sim, trained.servers, loaded.cohorts[0], logs[0])
    return servers, [[log] for log in logs]


def store_rows(
    sim: Simulation, store: Store, work: RoundInputs, rows: PyTree, round: int
) -> None:
    """Check a round's client states [A', w, L, ...] and pass them to the store."""
    local, clients = meshes.local_shards(sim.mesh), column(work.slots, "client")
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), rows)
    ids = clients[local].reshape(-1)
    check_rows(rows, ids, round)
    others = clients, slot_processes(sim, clients)
    remote = (np.delete(x, local, axis=0).reshape(-1) for x in others)
    store.scatter(ids, rows, round, *remote)


ONE_ROUND = CallKind(check_round_rows, read_rounds, train_round, finish_round)
