"""What calls of one round and of many share: inputs, schedules, results.

A call is one use of a compiled program. `one_round.py` and `many_rounds.py` are the
two kinds, `rounds.py` trains calls one after the other.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.client import SlotInputs, column, pack_slots
from fedfr_jax.federated.participation import (
    before_round,
    finish_log,
    full_steps,
    local_steps,
    received_metrics,
)
from fedfr_jax.federated.pipeline import CohortRows, Progress
from fedfr_jax.federated.round_checks import check_dropped, check_metrics
from fedfr_jax.federated.sampling import random_client
from fedfr_jax.federated.schedule import build_schedule
from fedfr_jax.federated.state import RoundLog, Runs, Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.streaming import RoundInputs
from fedfr_jax.federated.systems.settings import Systems
from fedfr_jax.types import Algorithm, Cohort, Prepared, PyTree

region = jax.profiler.TraceAnnotation  # names the host's work in a profile


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


def sort_cohort(cohort: Cohort) -> Cohort:
    """Sort a cohort by client id."""
    order, part = np.argsort(cohort.ids, kind="stable"), cohort.participation
    if part is not None:
        part = part.take(order)
    return cohort._replace(ids=cohort.ids[order], participation=part)


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


def slot_processes(sim: Simulation, slots: np.ndarray) -> np.ndarray:
    """Process that trains each of the slots [A, w, L]."""
    of_device = meshes.process_of_shards(sim.mesh)
    return np.broadcast_to(of_device[:, None, None], slots.shape)


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


class Dispatched(NamedTuple):
    """Results of a call of all runs, as soon as the devices have begun with it."""

    loaded: Any  # a LoadedRound or LoadedCall, without what is on the devices
    servers: PyTree
    rows: PyTree  # client states
    metrics: dict
    is_finite: PyTree  # of the servers


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
