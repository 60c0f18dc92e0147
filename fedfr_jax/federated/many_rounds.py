"""Many rounds in one call: the host samples and schedules, the devices run them all.

Cohorts and schedules are functions of (seed, round), so that the host knows those of n
rounds before the first is trained. The clients of all n have their personal rows on the
devices, where a round finds what an earlier one left; the store gets each row once, at
the end of the call, as of the last round that its client trained in.
"""

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.federated.client import column
from fedfr_jax.federated.engine import CallInputs, Round, empty_prepared
from fedfr_jax.federated.finite import check_finite, check_rows
from fedfr_jax.federated.privacy.accountant import check_round
from fedfr_jax.federated.programs import GIB, check_memory_on_call, on_mesh
from fedfr_jax.federated.simulation import (
    RoundLog,
    checked_metrics,
    cohort_of_round,
    finished_log,
    in_order_of_ids,
    region,
    schedule_cohort,
)
from fedfr_jax.federated.state import Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.streaming import (
    RoundInputs,
    StreamShape,
    build_layout,
    num_waves,
)
from fedfr_jax.federated.systems.rounds import Systems
from fedfr_jax.types import Algorithm, Cohort, Prepared, PyTree


class HostCall(NamedTuple):
    """A call of `len(cohorts)` rounds, at most n, in host memory."""

    first: int
    cohorts: list[Cohort]
    works: list[RoundInputs]
    ids: np.ndarray  # [C] int64 clients of all rounds, ascending
    rows: PyTree  # [U, ...] theirs, zeros behind them
    inputs: CallInputs  # [n, ...], zeros behind the rounds
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
      name: what says the number of rounds, for the error.
    """
    reasons = {
        "an algorithm whose server prepares each round": algorithm.prepare is not None,
        "systems whose clients take time or are chosen by loss": systems.has_world,
        "streamed examples (data_placement)": is_streamed,
        "model_shards above 1": mesh.shape[meshes.MODEL] > 1,
        "several processes": jax.process_count() > 1,
    }
    for reason, is_so in reasons.items():
        if number > 1 and is_so:
            raise ValueError(
                f"{name} must be 1 with {reason}, got {number}. Remove it."
            )


def simulate_rounds(
    sim: Simulation,
    server: PyTree,
    store: Store,
    first: int,
    count: int,
    *,
    most: int = 0,
) -> tuple[PyTree, list[RoundLog]]:
    """`simulate_round` for `count` rounds in one call: (server, a log for each).

    Args:
      most: n, what the program is compiled for; 0 is `count`.

    Raises:
      ValueError: for rounds that need the host.
      FloatingPointError: for the first round of a number that is not finite; nothing of
        the call is kept.
    """
    check_rounds_per_call(
        "rounds of one call",
        max(count, most),
        *(sim.algorithm, sim.systems),
        mesh=sim.mesh,
        is_streamed=sim.data.is_streamed,
    )
    with region("sample"):
        call = load_call(sim, store, first, count, most or count)
    with region("train"):
        server, found = train_call(sim, sim.programs, server, call, sim.key, sim.hyper)
    return server, store_call(sim, store, call, *found)


def load_call(
    sim: Simulation, store: Store, first: int, count: int, most: int
) -> HostCall:
    """Sample and schedule the rounds, and load the states of all their clients.

    Raises:
      ValueError: when a round would overspend the privacy budget, or the rows do not
        fit.
    """
    cohorts, works, layouts = [], [], []
    for number in range(first, first + count):
        check_round(sim.accountant, number)
        cohort = cohort_of_round(sim, number)
        if sim.num_partial_sums is not None:
            cohort = in_order_of_ids(cohort)
        work = schedule_cohort(sim, cohort, empty_prepared(len(cohort.ids)))
        size = StreamShape(1, num_waves(work, sim.mesh), 0)
        cohorts.append(cohort)
        works.append(work)
        layouts.append(build_layout(work, sim.mesh, size))
    slots = np.stack([x.slots for x in layouts])
    clients = column(slots, "client")
    ids = np.unique(clients)
    ids = ids[ids >= 0].astype(np.int64)
    num_rows = min(most * sim.num_places, sim.population.num_clients)
    check_rows_fit(sim, store, most, num_rows)
    with region("gather"):
        rows, is_new = store.gather(ids)
    places = np.searchsorted(ids, clients).astype(np.int32)
    set_new(column(slots, "is_new"), np.where(clients < 0, len(ids), places), is_new)
    inputs = CallInputs(
        slots=slots,
        rows=np.where(clients < 0, np.int32(num_rows), places),
        order=np.stack([x.order for x in layouts]),
    )
    return HostCall(
        first=first,
        cohorts=cohorts,
        works=works,
        ids=ids,
        rows=jax.tree.map(lambda x: filled_up(x, num_rows), rows),
        inputs=CallInputs(*(filled_up(x, most) for x in inputs)),
        extra=works[0].added._replace(num_added=()),  # the slots say it
    )


def set_new(flags: np.ndarray, places: np.ndarray, is_new: np.ndarray) -> None:
    """Set in `flags` [count, A, w, L] whether a client has no state before the round.

    Args:
      places: like `flags`, each slot's client among C; C where it is idle.
      is_new: [C] before the call.
    """
    is_new = np.append(is_new, True)
    for of_round, place in zip(flags, places, strict=True):
        of_round[:] = is_new[place]
        is_new[place] = False
        is_new[-1] = True


def filled_up(x: np.ndarray, size: int) -> np.ndarray:
    """Pad `x` [m, ...] with zeros to [size, ...]."""
    if len(x) == size:
        return x
    return np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)])


def check_rows_fit(sim: Simulation, store: Store, most: int, num_rows: int) -> None:
    """Raise ValueError if the client states of a call do not fit a device."""
    needed = num_rows * trees.num_bytes(store.template)
    free = meshes.free_bytes(sim.mesh) if needed else None
    if free is not None and needed > free:
        raise ValueError(
            "rounds_per_call must leave room for the states of its clients on "
            f"a device, got {most}: {num_rows:,} states need {needed / GIB:.2f} GiB, "
            f"{free / GIB:.2f} GiB are free. Lower it."
        )


def train_call(
    sim: Simulation,
    programs: Round,
    server: PyTree,
    call: HostCall,
    key: jax.Array,
    hyper: PyTree,
) -> tuple[PyTree, tuple]:
    """Run a call: (server, (client states [U, ...], metrics [n, K], is_finite [n])).

    Raises:
      MemoryError: when it does not fit a device, see `check_memory_on_call`.
    """
    whole = meshes.replicated(sim.mesh)
    cut = NamedSharding(sim.mesh, P(None, meshes.CLIENTS))
    slots, places, order = call.inputs
    slots, places = meshes.put_numbers((slots, places), cut)
    numbers = np.int32(len(call.cohorts)), order, call.extra, np.int32(call.first)
    count, order, extra, first = meshes.put_numbers(numbers, whole)
    with check_memory_on_call(sim, programs.run_rounds) as run:
        server, *found = run(
            server,
            meshes.put_global(call.rows, whole),
            count,
            CallInputs(slots, places, order),
            sim.device_data,
            (extra, first, key, hyper),
        )
        return server, tuple(meshes.fetch(found))


def call_shapes(sim: Simulation, round_shapes: tuple, most: int) -> tuple:
    """Arguments of `Round.run_rounds` as shapes, for `lower`.

    Args:
      round_shapes: of `programs.round_arguments`.
      most: n, rounds of a call.
    """
    server, rows, slots, order, table, (extra, number, key, hyper) = round_shapes
    cut = NamedSharding(sim.mesh, P(None, meshes.CLIENTS))
    shape = lambda x, *axes: jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype)
    num_rows = min(most * sim.num_places, sim.population.num_clients)
    of_client = lambda x: jax.ShapeDtypeStruct((num_rows, *x.shape[3:]), x.dtype)
    slots = shape(slots, most)
    places = jax.ShapeDtypeStruct(slots.shape[:-1], slots.dtype)
    inputs = CallInputs(
        *meshes.shapes_at((slots, places), (cut, cut)),
        on_mesh(sim.mesh, shape(order, most)),
    )
    rows = on_mesh(sim.mesh, jax.tree.map(of_client, rows))
    return server, rows, number, inputs, table, (extra, number, key, hyper)


def store_call(
    sim: Simulation,
    store: Store,
    call: HostCall,
    rows: PyTree,
    found: dict,
    is_finite: np.ndarray,
) -> list[RoundLog]:
    """Check the rounds' numbers in order, then pass the client states to the store.

    Args:
      rows, found, is_finite: as of `train_call`.
    """
    logs, rounds = [], np.full(len(call.ids), -1)
    keeps_first = not jax.tree.leaves(store.template)  # of no rows, as `Store` does
    for i, (cohort, work) in enumerate(zip(call.cohorts, call.works, strict=True)):
        own = {name: x[i] for name, x in found.items()}
        metrics = checked_metrics(own, cohort, sim.algorithm.min_kept)
        check_finite(is_finite[i], f"round {cohort.round + 1}")
        log = RoundLog(cohort.ids, metrics, work.added.num_added, work.plan)
        logs.append(finished_log(sim, cohort, log))
        trained = np.searchsorted(call.ids, work.clients[work.clients >= 0])
        is_known = rounds[trained] >= 0
        rounds[trained[~is_known] if keeps_first else trained] = cohort.round
    rows = jax.tree.map(lambda x: x[: len(call.ids)], rows)
    check_rows(rows, call.ids, call.cohorts[-1].round)
    store.scatter(call.ids, rows, rounds)
    return logs
