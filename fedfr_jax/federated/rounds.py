"""Rounds on the host: sample, prepare, schedule, load, train, store.

A simulation is one run; the members of a sweep are several in one program. Both are
`Runs`, and go the same way through a round.

`advance` trains a round, or many in one call of a compiled program. Cohorts and
schedules are functions of (seed, round), so that the host knows those of n rounds
before the first is trained. The personal rows of all their clients are on the devices,
where each round updates those of its cohort; the store gets each row once, at the end
of the call.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.federated.client import SlotInputs, column, pack_slots
from fedfr_jax.federated.engine import (
    IS_FINITE,
    CallInputs,
    RoundConstants,
    empty_prepared,
)
from fedfr_jax.federated.model_parallel import row_placement
from fedfr_jax.federated.participation import (
    after_round,
    before_round,
    finish_log,
    local_steps,
    received_metrics,
)
from fedfr_jax.federated.programs import check_memory_on_call, check_rows_fit
from fedfr_jax.federated.sampling import random_client
from fedfr_jax.federated.schedule import build_schedule
from fedfr_jax.federated.state import RoundLog, Runs, Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.streaming import RoundInputs
from fedfr_jax.federated.systems.settings import Systems
from fedfr_jax.types import Algorithm, Cohort, Prepared, PyTree

region = jax.profiler.TraceAnnotation  # names the host's work in a profile


def advance(
    runs: Runs,
    servers: PyTree,
    stores: Sequence[Store],
    first: int,
    count: int = 1,
    *,
    max_rounds: int = 0,
) -> tuple[PyTree, list[list[RoundLog]]]:
    """Train the rounds first..first + count - 1 of all runs.

    Args:
      max_rounds: n, what the program is compiled for, above 1 in one call of it; 0 is
        `count`.

    Returns:
      (servers, the logs of each run), with the same bits for any n.

    Raises:
      ValueError: for several rounds that need the host.
      FloatingPointError: for the first round with a number that is not finite; nothing
        of the call is stored.
    """
    max_rounds, sim = max_rounds or count, runs.sims[0]
    if max_rounds == 1:
        with region("sample"):
            cohorts = [
                before_round(sim, runs.member(servers, s), first)
                for s, sim in enumerate(runs.sims)
            ]
        servers, logs = run_cohorts(runs, servers, stores, cohorts)
        return servers, [[log] for log in logs]
    check_rounds_per_call(
        "rounds of one call",
        max_rounds,
        sim.algorithm,
        sim.settings.systems,
        mesh=sim.mesh,
        is_streamed=sim.data.is_streamed,
    )
    with region("sample"):
        calls = [
            load_call(sim, store, first, count, max_rounds)
            for sim, store in zip(runs.sims, stores, strict=True)
        ]
    with region("train"):
        servers, rows, metrics, is_finite = train_call(runs, servers, calls)
    logs = []
    for s, (sim, store, call) in enumerate(zip(runs.sims, stores, calls, strict=True)):
        numbers = runs.member(rows, s), runs.member(metrics, s, 1), is_finite
        logs.append(store_call(sim, store, call, *numbers))
    return servers, logs


def check_rounds_per_call(
    name: str,
    number: int,
    algorithm: Algorithm,
    systems: Systems,
    *,
    mesh: Mesh,
    is_streamed: bool,
) -> None:
    """Raise ValueError if rounds need the host, so that a call can have only one.

    Args:
      name: of the setting, for the error.
    """
    reasons = {
        "an algorithm whose server prepares each round": algorithm.prepare is not None,
        "systems whose clients take time or are chosen by loss": systems.has_state,
        "streamed examples (data_placement)": is_streamed,
        "model_shards above 1": mesh.shape[meshes.MODEL] > 1,
        "several processes": jax.process_count() > 1,
    }
    for reason, is_given in reasons.items():
        if number > 1 and is_given:
            raise ValueError(
                f"{name} must be 1 with {reason}, got {number}. Remove it."
            )


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
    parts = zip(sims, stores, cohorts, trained.works, strict=True)
    for s, (sim, store, cohort, work) in enumerate(parts):
        log = round_log(sim, cohort, work, runs.member(trained.metrics, s), input_wait)
        check_state(runs.member(servers, s), f"round {cohort.round + 1}")
        store_rows(sim, store, work, runs.member(trained.rows, s, 1), cohort.round)
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
        partial_sums=sim.settings.partial_sums,
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
    _, waves, lanes = plan.slots.shape  # of a partial sum
    places = plan.slots.reshape(num_devices, -1, lanes)
    order = np.empty(len(ids) + 1, np.int32)  # the last entry is for idle slots
    order[places.reshape(-1)] = np.arange(places.size)
    if part is not None:  # an absent client's slot is idle
        places = np.where(part.is_present.take(places, mode="wrap"), places, -1)
    slots = pack_slots(inputs, places)
    column(slots, "partial_sum")[:] = np.arange(slots.shape[1])[:, None] // waves
    return RoundInputs(rows=(), slots=slots, order=order[:-1], added=extra, plan=plan)


class TrainedRound(NamedTuple):
    """Results of a round of all runs, in host memory but for the servers."""

    servers: PyTree
    works: list[RoundInputs]  # of the runs, in whole segments
    rows: PyTree  # client states [A', w, L, ...]
    metrics: dict  # {name: [K]}


class LoadedRound(NamedTuple):
    """Inputs of a round of all runs, on the devices once a segment is asked for."""

    works: list[RoundInputs]  # of the runs, in whole segments
    segments: Iterator[tuple[PyTree, ...]]  # (rows, slots, table) of each
    is_whole: bool  # one segment: one call trains the round
    order: PyTree
    constants: RoundConstants


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
    numbers = runs.join(orders), runs.join(extras), np.int32(round)
    order, extra, number = meshes.put_numbers(numbers, meshes.replicated(mesh))
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
    constants = RoundConstants(extra, number, runs.key, runs.hyper)
    return LoadedRound(works, segments, size.segments == 1, order, constants)


def train_round(
    runs: Runs, servers: PyTree, works: Sequence[RoundInputs], round: int
) -> TrainedRound:
    """Load and train one round of all runs, segment by segment."""
    works, segments, is_whole, order, constants = load_round(runs, works, round)
    sim, programs = runs.sims[0], runs.programs
    if is_whole:
        ((rows, slots, table),) = segments
        with check_memory_on_call(sim, programs.run_whole) as whole:
            servers, rows, metrics = whole(
                servers, rows, slots, order, table, constants
            )
            rows, metrics = meshes.fetch_local(rows), meshes.fetch(metrics)
            return TrainedRound(servers, works, rows, metrics)
    total, outputs, new_rows = None, [], []
    with check_memory_on_call(sim, programs.run) as run:
        for rows, slots, table in segments:
            segment = rows, slots, table, constants
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
        servers, metrics = programs.finish(servers, total, outputs, order, constants)
    waves = 2 if runs.is_sweep else 1  # their axis
    rows = jax.tree.map(lambda *x: np.concatenate(x, axis=waves), *new_rows)
    return TrainedRound(servers, works, rows, meshes.fetch(metrics))


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


# Many rounds in one call.


class HostCall(NamedTuple):
    """A call of `len(cohorts)` rounds, at most n, in host memory."""

    first: int
    cohorts: list[Cohort]
    works: list[RoundInputs]
    ids: np.ndarray  # [C] int64 clients of all rounds, ascending
    rows: PyTree  # [U, ...] of these clients, padded with zeros
    inputs: CallInputs  # [n, ...], padded with zeros
    extra: Prepared  # of every round


def load_call(
    sim: Simulation, store: Store, first: int, count: int, max_rounds: int
) -> HostCall:
    """Sample and schedule the rounds, and load the states of all their clients.

    Raises:
      ValueError: when a round would overspend the privacy budget.
      MemoryError: when the rows do not fit.
    """
    cohorts, works = [], []
    for number in range(first, first + count):
        cohort = before_round(sim, (), number)
        if sim.settings.reproducible_sum:
            cohort = sort_cohort(cohort)
        cohorts.append(cohort)
        works.append(schedule_cohort(sim, cohort, empty_prepared(len(cohort.ids))))
    slots = np.stack([x.slots for x in works])
    clients = column(slots, "client")
    is_idle = clients < 0
    ids = np.unique(clients)
    ids = ids[ids >= 0].astype(np.int64)
    num_rows = min(max_rounds * sim.num_places, sim.population.num_clients)
    num_bytes = num_rows * trees.num_bytes(store.template)
    check_rows_fit(sim, num_bytes, "rounds_per_call", max_rounds)
    with region("gather"):
        rows, is_new = store.gather(ids)
    places = np.searchsorted(ids, clients).astype(np.int32)
    set_new(column(slots, "is_new"), np.where(is_idle, len(ids), places), is_new)
    inputs = CallInputs(
        slots=slots,
        rows=np.where(is_idle, np.int32(num_rows), places),
        order=np.stack([x.order for x in works]),
    )
    return HostCall(
        first=first,
        cohorts=cohorts,
        works=works,
        ids=ids,
        rows=jax.tree.map(lambda x: pad_rows(x, num_rows), rows),
        inputs=jax.tree.map(lambda x: pad_rows(x, max_rounds), inputs),
        extra=works[0].added._replace(num_added=()),  # it is in the slots
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


def train_call(
    runs: Runs, servers: PyTree, calls: Sequence[HostCall]
) -> tuple[PyTree, PyTree, dict, np.ndarray]:
    """Run a call: (servers, client states [U, ...], metrics [n, K], is_finite [n]).

    Of a sweep's members states are [S, U, ...] and metrics [n, S, K].

    Raises:
      MemoryError: when it does not fit a device, see `check_memory_on_call`.
    """
    sim = runs.sims[0]
    whole = meshes.replicated(sim.mesh)
    cut = NamedSharding(sim.mesh, P(None, meshes.CLIENTS))
    inputs = [call.inputs for call in calls]
    slots = runs.join([x.slots for x in inputs], 2)
    places = runs.join([x.rows for x in inputs], 2)
    order = runs.join([x.order for x in inputs], 1)
    slots, places = meshes.put_numbers((slots, places), cut)
    count, first = np.int32(len(calls[0].cohorts)), np.int32(calls[0].first)
    extra = runs.join([call.extra for call in calls])
    numbers = meshes.put_numbers((count, order, extra, first), whole)
    count, order, extra, first = numbers
    rows = runs.join([call.rows for call in calls])
    with check_memory_on_call(sim, runs.programs.run_rounds) as run:
        servers, *results = run(
            servers,
            meshes.put_global(rows, whole),
            count,
            CallInputs(slots, places, order),
            sim.device_data,
            RoundConstants(extra, first, runs.key, runs.hyper),
        )
        return servers, *meshes.fetch(results)


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
      rows, metrics, is_finite: of `train_call`, of this run.
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
    store.scatter(call.ids, rows, rounds)
    return logs
