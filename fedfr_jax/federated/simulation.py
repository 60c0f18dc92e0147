"""Host side of a round: prepare, schedule, load, train, store.

A simulation is one run; the members of a sweep are several in one program. Both are
`Runs`, and go the same way through a round.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import Stream
from fedfr_jax.federated import model_parallel
from fedfr_jax.federated.client import Population, SlotInputs, column, pack
from fedfr_jax.federated.engine import (
    IS_FINITE,
    compile_round,
    empty_prepared,
    round_functions,
)
from fedfr_jax.federated.model_parallel import row_placement
from fedfr_jax.federated.participation import (
    after_round,
    before_round,
    check_participation,
    finish_log,
    local_steps,
    received_metrics,
)
from fedfr_jax.federated.privacy.mechanism import accountant_of, check_prepare
from fedfr_jax.federated.programs import (
    check_memory_on_call,
    check_rows_fit,
)
from fedfr_jax.federated.sampling import random_client
from fedfr_jax.federated.schedule import build_schedule, choose_steps_per_loop
from fedfr_jax.federated.state import AUTO, RoundLog, Runs, Settings, Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.streaming import RoundInputs, place_data
from fedfr_jax.federated.systems.rounds import with_systems
from fedfr_jax.schema import check_fields
from fedfr_jax.types import Algorithm, Cohort, Dataset, Prepared, PyTree

region = jax.profiler.TraceAnnotation  # names the host's work in a profile


def build_simulation(
    algorithm: Algorithm,
    batching: Batching,
    dataset: Dataset | Stream,
    population: Population,
    *,
    mesh: Mesh,
    **settings,
) -> Simulation:
    """Check the parts of a simulation, and combine them.

    Args:
      dataset: host or device arrays, copied to every device of the mesh once; or a
        `stream`, read while a round is trained.
      settings: fields of `Settings`.
    """
    settings = Settings(**settings)
    check_fields("", settings)
    num_clients = population.num_clients
    check_rows_of_clients(population, dataset.num_examples)
    settings = check_participation(settings, algorithm, num_clients)
    check_prepare(algorithm)
    sampling, cohort_size = settings.sampling, settings.cohort_size
    num_asked = settings.systems.num_asked(cohort_size)
    sizes = population.largest(sampling.max_cohort(num_clients, num_asked))
    population = population._replace(sizes_descending=sizes)
    inner, algorithm = algorithm, with_systems(algorithm, settings.systems, num_clients)
    data = place_data(mesh, dataset)
    lengths = lengths_of_loops(settings, mesh, batching, population)
    functions = round_functions(
        lambda hyper: algorithm,
        batching,
        mesh,
        max_local=int(sizes[0]),
        kind=data,
        shards=settings.partial_sums,
        steps_per_loop=lengths,
    )
    key = jax.random.key(settings.seed)
    return Simulation(
        algorithm=algorithm,
        batching=batching,
        mesh=mesh,
        data=data,
        population=population,
        settings=settings,
        programs=compile_round(functions, mesh, settings.partial_sums),
        key=meshes.put_global(key, meshes.replicated(mesh)),
        hyper=(),
        steps_per_loop=lengths,
        accountant=accountant_of(algorithm, sampling, num_clients, cohort_size),
        inner_algorithm=inner,
    )


def lengths_of_loops(
    settings: Settings, mesh: Mesh, batching: Batching, population: Population
) -> tuple[int, ...]:
    """Lengths of counted loops, descending; () for none.

    On GPUs "auto" is the best for 1024 of the clients over 16 rounds.
    """
    if settings.steps_per_loop != AUTO:
        lengths = tuple(np.ravel(settings.steps_per_loop).tolist())
        return () if lengths == (1,) else lengths
    if mesh.devices.flat[0].platform not in meshes.GPUS:
        return ()
    ids = np.unique(np.linspace(0, population.num_clients - 1, 1024).astype(np.int64))
    per_epoch = batching.steps_per_epoch(population.sizes(ids))
    epochs = [np.asarray(settings.epochs(number)) for number in range(16)]
    steps = [per_epoch * (x[ids] if x.ndim else x) for x in epochs]
    return choose_steps_per_loop(np.concatenate(steps))


def check_rows_of_clients(population: Population, num_rows: int) -> None:
    """Raise ValueError unless each client has some of the data set's rows."""
    first = 0
    for sizes in population.size_chunks():
        if (sizes <= 0).any():
            empty = (first + np.flatnonzero(sizes <= 0)[:5]).tolist()
            raise ValueError(
                f"every client must have an example, got none for {empty}."
            )
        first += len(sizes)
    if (last := population.offsets[-1]) > num_rows:
        raise ValueError(
            f"clients' rows must be among the data set's {num_rows}, got {last}."
        )
    if num_rows >= 2**31:
        raise ValueError(f"a data set must have less than 2^31 rows, got {num_rows}.")


def start_simulation(sim: Simulation, variables: PyTree) -> PyTree:
    """Initial server on every client device, sharded over `model`."""
    return model_parallel.put_on_mesh(sim.mesh, sim.algorithm.init(variables))


def open_store(sim: Simulation, server: PyTree, folder=None, **resume) -> Store:
    """Open the store for this algorithm's client states; `resume` as in `Store`."""
    key = jax.random.key(sim.settings.seed)
    template = jax.eval_shape(sim.algorithm.init_personal, key, server)
    num_clients = sim.population.num_clients
    is_shared = jax.process_count() > 1 and not resume.get("is_mirrored")
    sharer = jax.process_index() if is_shared else None
    with meshes.first_process_first("store"):
        return Store(template, num_clients, folder, sharer=sharer, **resume)


def simulate_round(
    sim: Simulation, server: PyTree, store: Store, round: int
) -> tuple[PyTree, RoundLog]:
    """Train one round: (server after it, log); client states go to the store."""
    with region("sample"):
        cohort = before_round(sim, server, round)
    return run_cohort(sim, server, store, cohort)


def run_cohort(
    sim: Simulation, server: PyTree, store: Store, cohort: Cohort
) -> tuple[PyTree, RoundLog]:
    """Train a round with the given clients, each once and in any order.

    Reproducible sums and their log are in the order of the ids.
    """
    server, (log,) = run_cohorts(sim.runs, server, [store], [cohort])
    return server, log


def run_cohorts(
    runs: Runs, servers: PyTree, stores: Sequence[Store], cohorts: Sequence[Cohort]
) -> tuple[PyTree, list[RoundLog]]:
    """Train the same round of all runs: (servers, a log for each)."""
    sims, data = runs.sims, runs.sims[0].data
    data.input_wait()  # forgets what was waited for before this round
    if sims[0].settings.reproducible_sum:
        cohorts = [sort_cohort(cohort) for cohort in cohorts]
    members = [runs.member(servers, s) for s in range(len(sims))]
    parts = zip(sims, members, stores, cohorts, strict=True)
    works = [assign(*part) for part in parts]
    if not data.is_streamed:  # of a stream the rows of a segment are on the devices
        num_bytes = trees.num_bytes([work.rows for work in works])
        num_bytes /= len(sims[0].mesh.local_devices)
        check_rows_fit(sims[0], num_bytes, "cohort_size", sims[0].settings.cohort_size)
    with region("train"):
        trained = train_round(runs, servers, works, cohorts[0].round)
    servers, logs, input_wait = trained.servers, [], data.input_wait()
    for s, (sim, store, cohort) in enumerate(zip(sims, stores, cohorts, strict=True)):
        work, parts = trained.works[s], [runs.member(x, s, 1) for x in trained.segments]
        rows = parts[0]
        if len(parts) > 1:
            rows = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *parts)
        log = round_log(sim, cohort, work, runs.member(trained.metrics, s), input_wait)
        check_state(runs.member(servers, s), f"round {cohort.round + 1}")
        store_rows(sim, store, work, rows, cohort.round)
        logs.append(log)
    return after_round(sims[0], servers, cohorts[0], logs[0]), logs


def round_log(
    sim: Simulation,
    cohort: Cohort,
    work: RoundInputs,
    metrics: dict,
    input_wait: float = 0.0,
) -> RoundLog:
    """Check a program's metrics {name: [K]}, and build the log of the round.

    Raises:
      FloatingPointError: for a metric or an update that is not finite.
    """
    metrics = check_metrics(metrics, cohort.ids, cohort.round)
    part, min_kept = cohort.participation, sim.algorithm.min_kept
    received = cohort.ids if part is None else cohort.ids[part.is_received]
    check_dropped(received_metrics(metrics, part), received, cohort.round, min_kept)
    log = RoundLog(cohort.ids, metrics, work.added.num_added, work.plan, input_wait)
    return finish_log(sim, cohort, log)


def sort_cohort(cohort: Cohort) -> Cohort:
    """Sort a cohort by client id."""
    order, part = np.argsort(cohort.ids, kind="stable"), cohort.participation
    if part is not None:
        part = part.take(order)
    return cohort._replace(ids=cohort.ids[order], participation=part)


def assign(
    sim: Simulation, server: PyTree, store: Store, cohort: Cohort
) -> RoundInputs:
    """Prepare and schedule a cohort, and load its client states."""
    extra = empty_prepared(len(cohort.ids))
    if sim.algorithm.prepare:
        with region("prepare"):
            extra = sim.algorithm.prepare(server, sim.context(cohort))
            extra = extra._replace(num_added=meshes.fetch(extra.num_added))
    work = schedule_cohort(sim, cohort, extra)
    if jax.process_count() > 1:  # another process may have written a client's row
        store.settle()
        meshes.barrier("rows are on disk")
    local = meshes.local_shards(sim.mesh)
    clients = column(work.slots, "client")[local]
    with region("gather"):
        rows, is_new = store.gather(clients.reshape(-1))
    column(work.slots, "is_new")[local] = is_new.reshape(clients.shape)
    return work._replace(
        rows=jax.tree.map(lambda x: x.reshape(clients.shape + x.shape[1:]), rows)
    )


def schedule_cohort(sim: Simulation, cohort: Cohort, extra: Prepared) -> RoundInputs:
    """Schedule a prepared cohort, without client states."""
    ids, part = cohort.ids, cohort.participation
    steps = local_steps(sim, cohort, extra.num_added)
    is_received = np.full(len(ids), True) if part is None else part.is_received
    num_devices = sim.mesh.shape[meshes.CLIENTS]
    plan = build_schedule(
        steps,
        num_devices=num_devices,
        lanes=sim.settings.clients_per_device,
        shards=sim.settings.partial_sums,
        ids=ids,
    )
    chosen = random_client(ids[is_received], sim.settings.seed, cohort.round)
    inputs = SlotInputs(
        client=ids,
        cohort_index=np.arange(len(ids)),
        is_new=1,
        offset=sim.population.offsets[ids],
        num_examples=sim.population.sizes(ids),
        num_added=extra.num_added,
        num_classes=sim.population.num_classes[ids],
        num_steps=steps,
        is_random_client=is_received & (ids == chosen),
        is_received=None if part is None else is_received,
        staleness=0 if part is None or part.staleness is None else part.staleness,
    )
    _, waves, lanes = plan.slots.shape  # of a shard
    places = plan.slots.reshape(num_devices, -1, lanes)
    order = np.empty(len(ids) + 1, np.int32)  # the last entry is for idle slots
    order[places.reshape(-1)] = np.arange(places.size)
    if part is not None:  # an absent client's slot is idle
        places = np.where(part.is_present.take(places, mode="wrap"), places, -1)
    slots = pack(inputs, places)
    column(slots, "partial_sum")[:] = np.arange(slots.shape[1])[:, None] // waves
    return RoundInputs(rows=(), slots=slots, order=order[:-1], added=extra, plan=plan)


class TrainedRound(NamedTuple):
    """Results of a round of all runs, in host memory but for the servers."""

    servers: PyTree
    works: list[RoundInputs]  # of the runs, in whole segments
    segments: list[PyTree]  # client states [A', w, L, ...] of each segment
    metrics: dict  # {name: [K]}


class LoadedRound(NamedTuple):
    """Inputs of a round of all runs, on the devices once a segment is asked for."""

    works: list[RoundInputs]  # of the runs, in whole segments
    segments: Iterator[tuple[PyTree, ...]]  # (rows, slots, table) of each
    is_whole: bool  # one segment: one call trains the round
    order: PyTree
    shared: tuple[PyTree, ...]  # by all segments


def load_round(runs: Runs, works: Sequence[RoundInputs], round: int) -> LoadedRound:
    """Cut one round of all runs into segments, loaded as they are asked for."""
    sim, tables = runs.sims[0], shared_tables(runs, works)
    mesh, data = sim.mesh, sim.data
    size = data.size_of(works, sim.largest, max(tables) + 1)
    works = [
        data.in_segments(work, size, table * size.rows)
        for work, table in zip(works, tables, strict=True)
    ]
    # The slots have the numbers of added examples.
    extras = [work.added._replace(num_added=()) for work in works]
    if size.room is not None:
        extras = [x._replace(added_rows=x.added_rows[:, : size.room]) for x in extras]
    orders = [work.order for work in works]
    shared = runs.join(orders), runs.join(extras), np.int32(round)
    order, extra, number = meshes.put_numbers(shared, meshes.replicated(mesh))
    count, cut = mesh.shape[meshes.CLIENTS], meshes.over_clients(mesh)

    def load(i):
        waves = slice(i * size.waves, (i + 1) * size.waves)
        parts = [
            jax.tree.map(lambda x: x[:, waves], (work.rows, work.slots))
            for work in works
        ]
        rows, slots = runs.join(parts, 1)
        places = row_placement(mesh, rows, is_stacked=runs.is_sweep)
        rows = meshes.put_local(rows, places, count)
        return rows, meshes.put_numbers(slots, cut)

    readers = [works[tables.index(table)] for table in sorted(set(tables))]
    segments = data.segments(size, load, readers)
    shared = extra, number, runs.key, runs.hyper
    return LoadedRound(works, segments, size.segments == 1, order, shared)


def train_round(
    runs: Runs, servers: PyTree, works: Sequence[RoundInputs], round: int
) -> TrainedRound:
    """Load and train one round of all runs, segment by segment."""
    works, segments, is_whole, order, shared = load_round(runs, works, round)
    sim, programs = runs.sims[0], runs.programs
    if is_whole:
        ((rows, slots, table),) = segments
        with check_memory_on_call(sim, programs.run_whole) as whole:
            servers, rows, metrics = whole(servers, rows, slots, order, table, shared)
            new_rows, metrics = [meshes.fetch_local(rows)], meshes.fetch(metrics)
            return TrainedRound(servers, works, new_rows, metrics)
    total, outputs, new_rows = None, [], []
    with check_memory_on_call(sim, programs.run) as run:
        for rows, slots, table in segments:
            segment = rows, slots, table, shared
            if total is None:
                total = programs.start(servers, *segment)
            total, output = run(total, servers, *segment)
            # Those of the segment before are fetched while this one trains.
            new_rows[-1:] = meshes.fetch_local(new_rows[-1:])
            new_rows.append(output.personal)
            outputs.append(output._replace(personal=()))
            jax.block_until_ready(output.weight)  # so that at most two tables exist
            del rows, slots, table, segment
        new_rows[-1:] = meshes.fetch_local(new_rows[-1:])
        servers, metrics = programs.finish(servers, total, outputs, order, shared)
        return TrainedRound(servers, works, new_rows, meshes.fetch(metrics))


def shared_tables(runs: Runs, works: Sequence[RoundInputs]) -> list[int]:
    """Index of the segment's data set that each run reads: [S], from 0.

    Members of one seed, or all if cohorts are the whole population, train the same
    clients in the same places; unless the server adds examples, they share one.
    """
    if works[0].added.added_rows.shape[1]:
        return list(range(len(works)))
    settings = runs.sims[0].settings
    is_all = settings.cohort_size == runs.sims[0].population.num_clients
    if is_all and not settings.stragglers.are_dropped:
        return [0] * len(works)
    seeds = [sim.settings.seed for sim in runs.sims]
    return [sorted(set(seeds)).index(seed) for seed in seeds]


def check_metrics(metrics: dict, ids: np.ndarray, round: int) -> dict:
    """Check the metrics {name: [K]} of a cohort `ids` [K] and its updates.

    A loss is taken before its step, so a client's last step can spoil the parameters
    under a finite loss.

    Returns:
      The metrics without `IS_FINITE`.

    Raises:
      FloatingPointError: for the first client with a number that is not finite. Rounds
        count from 1 in messages.
    """
    is_fine = metrics[IS_FINITE] > 0
    metrics = {name: x for name, x in metrics.items() if name != IS_FINITE}
    for name, values in [*metrics.items(), ("update", np.where(is_fine, 0, np.nan))]:
        is_finite = np.isfinite(values)
        if not is_finite.all():
            first = is_finite.argmin()
            origin = f"client {ids[first]} in round {round + 1}"
            check_number(name, values[first], origin)
    return metrics


def check_number(name: str, value: float, origin: str) -> None:
    """Raise FloatingPointError unless the number is finite."""
    if not np.isfinite(value):
        raise FloatingPointError(f"{name} of {origin} must be finite, got {value}")


def check_dropped(
    metrics: Mapping[str, np.ndarray], ids: np.ndarray, round: int, min_kept: float
) -> None:
    """Raise FloatingPointError if too many clients `ids` [K] are excluded.

    Args:
      min_kept: share of the cohort that must not be; nor may all be.
    """
    is_dropped = metrics.get("dropped", np.zeros(len(ids))) > 0
    is_enough = not is_dropped.all() and 1 - is_dropped.mean() >= min_kept
    if is_dropped.any() and not is_enough:
        bad = ids[is_dropped]
        some = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        raise FloatingPointError(
            f"updates of round {round + 1} must be finite and within max_norm for at "
            f"least {min_kept:.0%} of the cohort, got bad ones from {len(bad)} of "
            f"{len(ids)} clients ({some})"
        )


def check_rows(rows: PyTree, clients: np.ndarray, round: int) -> None:
    """Raise FloatingPointError if a client's state in `rows` [n, ...] is not finite.

    Args:
      clients: [n] ids, negative for idle slots.
    """
    for name, x in trees.by_name(rows).items():
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            continue
        is_fine = np.isfinite(x).reshape(len(x), -1).all(axis=1) | (clients < 0)
        if not is_fine.all():
            origin = f"client {clients[is_fine.argmin()]} after round {round + 1}"
            check_number(f"personal {name}", np.nan, origin)


def check_state(state: PyTree, origin: str) -> None:
    """Raise if a leaf of `state`, of a server or a training, is not finite."""
    check_finite(_is_finite(state), origin)


def check_finite(is_finite: bool, origin: str) -> None:
    """`check_state` with a known result."""
    if not is_finite:
        raise FloatingPointError(
            f"parameters after {origin} must be finite, got nan or infinity"
        )


_is_finite = jax.jit(trees.is_finite)


def store_rows(
    sim: Simulation, store: Store, work: RoundInputs, rows: PyTree, round: int
) -> None:
    """Check a round's client states [A', w, L, ...] and pass them to the store."""
    local, clients = meshes.local_shards(sim.mesh), column(work.slots, "client")
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), rows)
    ids = clients[local].reshape(-1)
    check_rows(rows, ids, round)
    remote_ids = np.delete(clients, local, axis=0).reshape(-1)
    if store.is_mirrored and len(remote_ids):  # each process keeps the rows of all
        ids, rows = meshes.gather_processes((ids, rows))
        remote_ids = ()
    store.scatter(ids, rows, round, remote_ids=remote_ids)
