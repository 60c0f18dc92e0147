"""Many rounds in one call of a compiled program.

Cohorts and schedules are functions of (seed, round), so that the host knows those of n
rounds before the first is trained. The personal rows of all their clients are on the
devices, where each round updates those of its cohort; the store gets each row once, at
the end of the call.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.federated.client import column
from fedfr_jax.federated.engine import CallInputs, empty_prepared
from fedfr_jax.federated.participation import before_round
from fedfr_jax.federated.programs import check_memory_on_call, check_rows_fit, on_mesh
from fedfr_jax.federated.simulation import (
    check_finite,
    check_rows,
    region,
    round_log,
    run_cohorts,
    schedule_cohort,
    sort_cohort,
)
from fedfr_jax.federated.state import RoundLog, Runs, Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.streaming import RoundInputs
from fedfr_jax.federated.systems.rounds import Systems
from fedfr_jax.types import Algorithm, Cohort, Prepared, PyTree


class HostCall(NamedTuple):
    """A call of `len(cohorts)` rounds, at most n, in host memory."""

    first: int
    cohorts: list[Cohort]
    works: list[RoundInputs]
    ids: np.ndarray  # [C] int64 clients of all rounds, ascending
    rows: PyTree  # [U, ...] of these clients, padded with zeros
    inputs: CallInputs  # [n, ...], padded with zeros
    extra: Prepared  # of every round


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
            (extra, first, runs.key, runs.hyper),
        )
        return servers, *meshes.fetch(results)


def call_shapes(sim: Simulation, round_shapes: tuple, max_rounds: int) -> tuple:
    """Arguments of `Round.run_rounds` as shapes, for `lower`.

    Args:
      round_shapes: of `programs.round_arguments`.
      max_rounds: n, rounds of a call.
    """
    server, rows, slots, order, table, shared = round_shapes
    _, number, _, _ = shared
    cut = NamedSharding(sim.mesh, P(None, meshes.CLIENTS))
    num_rows = min(max_rounds * sim.num_places, sim.population.num_clients)

    def row_shape(x):
        return jax.ShapeDtypeStruct((num_rows, *x.shape[3:]), x.dtype)

    slots, order = trees.shapes((slots, order), max_rounds)
    places = jax.ShapeDtypeStruct(slots.shape[:-1], slots.dtype)
    slots, places = meshes.shapes_at((slots, places), (cut, cut))
    inputs = CallInputs(slots, places, on_mesh(sim.mesh, order))
    rows = on_mesh(sim.mesh, jax.tree.map(row_shape, rows))
    return server, rows, number, inputs, table, shared


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
