"""Rounds on the host: sample, prepare, schedule, load, train, store.

A simulation is one run; the members of a sweep are several in one program. Both are
`Runs`, and go the same way through a round.

`advance` trains a round, or many in one call of a compiled program. Cohorts and
schedules are functions of (seed, round), so that the host knows those of n rounds
before the first is trained. The personal rows of all their clients are on the devices,
where each round updates those of its cohort; the store gets each row once, at the end
of the call.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
    full_steps,
    local_steps,
    received_metrics,
)
from fedfr_jax.federated.pipeline import Ahead, Alone, CohortRows, Progress, work_during
from fedfr_jax.federated.programs import (
    check_memory_on_call,
    check_rows_fit,
    size_of_call,
)
from fedfr_jax.federated.sampling import random_client
from fedfr_jax.federated.schedule import build_schedule, num_waves
from fedfr_jax.federated.state import RoundLog, Runs, Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.streaming import RoundInputs
from fedfr_jax.federated.systems.settings import Systems
from fedfr_jax.types import Algorithm, Cohort, Prepared, PyTree

region = jax.profiler.TraceAnnotation  # names the host's work in a profile


class TrainedCall(NamedTuple):
    """Rounds first..end-1 that are trained and stored."""

    first: int
    end: int
    servers: PyTree  # after the last
    logs: list[list[RoundLog]]  # of each run
    seconds: float  # since the call before, or since what was done after it
    wait_seconds: float  # of these, until its input was read
    late_seconds: float  # by which taking the call before outlasted this one
    is_alone: bool  # the next call is not in training yet


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
    calls, trained = [(first, first + count)], []
    max_rounds = max_rounds or count
    train_calls(runs, servers, stores, calls, trained.append, max_rounds=max_rounds)
    return trained[0].servers, trained[0].logs


def train_calls(
    runs: Runs,
    servers: PyTree,
    stores: Sequence[Store],
    calls: Sequence[tuple[int, int]],
    take: Callable[[TrainedCall], None],
    *,
    max_rounds: int = 1,
    cohorts: Sequence[Cohort] = (),
    is_followed: Callable[[int], bool] = lambda end: True,
) -> None:
    """Train calls of rounds (first, end) of all runs, one after the other.

    While a call trains, a thread reads the next one, and `take` gets the results of the
    one before. A call that depends on those waits for them, see `needs_round_before`.

    Args:
      max_rounds: of a call; one round alone has a program of its own.
      cohorts: of the runs, in a single round; () samples them.
      is_followed: end -> whether the next call may be in training while the results of
        this one are taken; asked once when it is trained.

    Raises:
      as `advance`, after what was trained before is taken.
    """
    sim = runs.sims[0]
    systems = sim.settings.systems
    check_rounds_per_call(
        "rounds of one call", max_rounds, sim.algorithm, systems, sim.mesh
    )
    kind = ONE_ROUND if max_rounds == 1 else MANY_ROUNDS
    is_serial = bool(needs_round_before(sim.algorithm, systems))
    is_roomy = kind.check_rows(runs, stores, max_rounds, cohorts)
    progress = Progress(calls[0][0], servers if is_serial else None)
    reading = Reading(runs, stores, calls, progress, max_rounds, cohorts, is_roomy)
    has_one = len(calls) == 1 and not sim.data.is_streamed
    ahead, before = (Alone if has_one else Ahead)(kind.read(reading)), None

    def take_before(is_alone: bool) -> None:
        nonlocal before, servers
        if before is None:
            return
        ((first, end), trained, times), before = before, None
        after, logs = kind.finish(runs, stores, trained)
        del trained
        servers = after if is_alone else servers
        take(TrainedCall(first, end, after, logs, *times, is_alone))
        progress.reach(end, after if is_serial else None)

    try:
        begin = time.perf_counter()
        for call in calls:
            if before:
                is_free = is_roomy and is_followed(call[0]) and ahead.is_ready()
                if not meshes.is_everywhere(is_free):
                    take_before(is_alone=True)
                    begin = time.perf_counter()
            try:
                work = functools.partial(take_before, False) if before else None
                with region("train"):
                    trained, late = kind.train(runs, servers, ahead, work)
            except Exception:
                take_before(is_alone=True)
                raise
            servers, end = trained.servers, time.perf_counter()
            wait = max(ahead.waited() - trained.loaded.prepare_seconds, 0.0)
            before = call, trained, (end - late - begin, wait, late)
            begin = end
            del trained
        take_before(is_alone=True)
    finally:
        progress.close()
        ahead.close()


class Reading(NamedTuple):
    """What the thread that reads calls needs to know."""

    runs: Runs
    stores: Sequence[Store]
    calls: Sequence[tuple[int, int]]
    progress: Progress
    max_rounds: int
    cohorts: Sequence[Cohort]  # of the runs, in a single round; () samples them
    is_roomy: bool  # client states of two calls fit the devices

    def inputs(self) -> Iterator[tuple[int, int, list["RunInputs"]]]:
        """Yield (first, end) and the inputs of the runs, call by call."""
        sims, first = self.runs.sims, self.calls[0][0]
        stored = self.progress.wait_for
        rows = [CohortRows(store, first, stored) for store in self.stores]
        is_serial = needs_round_before(sims[0].algorithm, sims[0].settings.systems)
        for first, end in self.calls:
            servers = stored(first) if is_serial else None
            parts = []
            for s, sim in enumerate(sims):
                server = self.runs.member(servers, s) if is_serial else None
                numbers = range(first, end)
                with region("sample"):
                    drawn = list(self.cohorts[s : s + 1]) or [
                        before_round(sim, server, round) for round in numbers
                    ]
                if sim.settings.reproducible_sum:
                    drawn = [sort_cohort(cohort) for cohort in drawn]
                parts.append(RunInputs(sim, server, drawn, rows[s]))
            yield first, end, parts


class RunInputs(NamedTuple):
    """A run's part in a call that is to be read."""

    sim: Simulation
    server: PyTree  # None unless the call depends on it
    cohorts: list[Cohort]  # of its rounds
    rows: CohortRows


class CallKind(NamedTuple):
    """How calls of one round, or of many, are read, trained and stored."""

    # (runs, stores, max_rounds, cohorts) -> whether the devices have room for the
    # client states of two calls; raises MemoryError if not for those of one
    check_rows: Callable[..., bool]
    # Reading -> the inputs of each call, in pieces
    read: Callable[[Reading], Iterator]
    # (runs, servers, Ahead, work) -> (trained, seconds by which `work`, which is done
    # while the devices train, outlasted them)
    train: Callable[..., tuple]
    # (runs, stores, trained) -> (servers, the logs of each run)
    finish: Callable[..., tuple]


def needs_round_before(algorithm: Algorithm, systems: Systems) -> str:
    """Why a round's input is known only when the round before has ended; else ""."""
    if algorithm.prepare is not None:
        return "an algorithm whose server prepares each round"
    if systems.has_state:
        return "systems whose clients take time or are chosen by loss"
    return ""


def check_rounds_per_call(
    name: str, number: int, algorithm: Algorithm, systems: Systems, mesh: Mesh
) -> None:
    """Raise ValueError if rounds need the host, so that a call can have only one.

    Args:
      name: of the setting, for the error.
    """
    reason = needs_round_before(algorithm, systems)
    if mesh.shape[meshes.MODEL] > 1:
        reason = reason or "model_shards above 1"
    if number > 1 and reason:
        raise ValueError(f"{name} must be 1 with {reason}, got {number}. Remove it.")


def run_cohort(
    sim: Simulation, server: PyTree, store: Store, cohort: Cohort
) -> tuple[PyTree, RoundLog]:
    """Train a round with the given clients, each once and in any order.

    Reproducible sums and their log are in the order of the ids.
    """
    trained, calls = [], [(cohort.round, cohort.round + 1)]
    train_calls(sim.runs, server, [store], calls, trained.append, cohorts=[cohort])
    ((log,),) = trained[0].logs
    return trained[0].servers, log


# One round in a call, in segments.


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


def round_log(
    sim: Simulation,
    cohort: Cohort,
    work: RoundInputs,
    metrics: dict,
) -> RoundLog:
    """Check a program's metrics {name: [K]}, and build the log of the round.

    Raises:
      FloatingPointError: for a metric or an update that is not finite.
    """
    metrics = check_metrics(metrics, cohort.ids, cohort.round)
    part, min_kept = cohort.participation, sim.algorithm.min_kept
    received = cohort.ids if part is None else cohort.ids[part.is_received]
    check_dropped(received_metrics(metrics, part), received, cohort.round, min_kept)
    log = RoundLog(cohort.ids, metrics, work.added.num_added, work.plan)
    return finish_log(sim, cohort, log)


def sort_cohort(cohort: Cohort) -> Cohort:
    """Sort a cohort by client id."""
    order, part = np.argsort(cohort.ids, kind="stable"), cohort.participation
    if part is not None:
        part = part.take(order)
    return cohort._replace(ids=cohort.ids[order], participation=part)


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


def slot_processes(sim: Simulation, slots: np.ndarray) -> np.ndarray:
    """Process that trains each of the slots [A, w, L]."""
    of_device = meshes.process_of_shards(sim.mesh)
    return np.broadcast_to(of_device[:, None, None], slots.shape)


def schedule_cohort(sim: Simulation, cohort: Cohort, extra: Prepared) -> RoundInputs:
    """Schedule a prepared cohort, without client states."""
    ids, part = cohort.ids, cohort.participation
    steps = local_steps(sim, cohort, extra.num_added)
    is_received = np.full(len(ids), True) if part is None else part.is_received
    num_devices = sim.mesh.shape[meshes.CLIENTS]
    planned = steps
    if sim.excluded is not None:  # so that clients of all members have the same slots
        planned = full_steps(sim, ids, cohort.round, extra.num_added)
    plan = build_schedule(
        planned,
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


class Dispatched(NamedTuple):
    """Results of a call of all runs, as soon as the devices have begun with it."""

    loaded: Any  # a LoadedRound or LoadedCall, without what is on the devices
    servers: PyTree
    rows: PyTree  # client states
    metrics: dict
    is_finite: PyTree  # of the servers


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
    is_finite = _are_finite(servers) if runs.is_sweep else [_is_finite(servers)]
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


ONE_ROUND = CallKind(check_round_rows, read_rounds, train_round, finish_round)


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


@jax.jit
def _is_finite(state):
    return trees.is_finite(trees.joined(state))


@jax.jit
def _are_finite(states):  # of members, [S]
    return jax.vmap(_is_finite)(states)


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


# Many rounds in one call.


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
