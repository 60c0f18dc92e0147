"""A round as the host sees it: sample, prepare, schedule, train, put rows away."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.federated import model_axis, sampling
from fedfr_jax.federated.client import Population, Slots, column, pack
from fedfr_jax.federated.engine import IS_FINITE, REDUCTIONS, build_round, no_extra
from fedfr_jax.federated.finite import (
    check_dropped,
    check_metrics,
    check_rows,
    check_state,
    check_updates,
)
from fedfr_jax.federated.layout import Work
from fedfr_jax.federated.memory import check_memory
from fedfr_jax.federated.schedule import Plan, schedule
from fedfr_jax.federated.segments import begin, train, whole_rows
from fedfr_jax.federated.shapes import compiled_beside
from fedfr_jax.federated.state import Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.stragglers import (
    Stragglers,
    active,
    check_stragglers,
    epochs_of,
    num_trained,
)
from fedfr_jax.federated.tables import table_on
from fedfr_jax.feed import Feed
from fedfr_jax.schema import check_choice, check_ranges
from fedfr_jax.stream import Stream
from fedfr_jax.types import Algorithm, Cohort, Dataset, PyTree

CANONICAL_SHARDS = 8


class Outcome(NamedTuple):
    """What one round leaves for the log."""

    ids: np.ndarray  # [K] int64, in the order of all other arrays
    metrics: dict[str, np.ndarray]  # {name: [K]}
    num_extra: np.ndarray  # [K] int32 examples added by the server
    plan: Plan
    waited: float = 0.0  # seconds that streamed examples were waited for


def simulation(
    algorithm: Algorithm,
    feed: Feed,
    table: Dataset | Stream,
    population: Population,
    *,
    mesh: Mesh,
    cohort_size: int = 0,
    local_epochs: int | tuple[int, ...] | Callable = 1,
    lanes: int = 1,
    seed: int = 0,
    reduction: str = "sum",
    shards: int = CANONICAL_SHARDS,
    stragglers: Stragglers = Stragglers(),  # noqa: B008 (a constant)
) -> Simulation:
    """Check the pieces and put them together.

    Args:
      table: host or device arrays, copied to every device of the mesh once; or a
        `stream`, read while a round is trained.
      cohort_size: K in [1, N]; 0 takes all clients in every round.
      local_epochs: passes over a client's examples; a tuple gives one per round and
        its last entry stays; a function of the round gives a number, or an array [N]
        of one per client.
      lanes: clients trained side by side on a device, L >= 1.
      reduction: sum (as fast as it gets; the last bits depend on the number of devices)
        or canonical (they do not, nor on the order of the cohort; lanes still matter;
        FedDANE's gradients are added up before the round, device by device).
      shards: V of the canonical reduction, best a multiple of every number of devices
        that will be used; a cohort of K has places for K rounded up to V x lanes, and a
        device holds the sums of V / devices shards.
      stragglers: how many of a cohort train for fewer epochs, or are dropped.

    Raises:
      ValueError: when a client owns no example, or a size is out of range, as a cohort
        too small for its algorithm.
    """
    num_clients = population.num_clients
    check_rows_of_clients(population, table.num_examples)
    if lanes < 1:
        raise ValueError(f"lanes must be at least 1, got {lanes}.")
    check_choice("reduction", reduction, REDUCTIONS)
    if shards < 1:
        raise ValueError(f"shards must be at least 1, got {shards}.")
    fixed = shards if reduction == "canonical" else None
    cohort_size = cohort_size or num_clients
    sampling.sample(seed, 0, num_clients, cohort_size)
    algorithm.check_cohort(num_trained(stragglers, cohort_size))
    population = population._replace(falling=population.largest(cohort_size))
    if not callable(local_epochs):
        given, local_epochs = local_epochs, _by_round(local_epochs)
        check_stragglers(stragglers, int(np.min(given)), cohort_size)
    source = table_on(mesh, table)
    return Simulation(
        algorithm=algorithm,
        feed=feed,
        mesh=mesh,
        source=source,
        population=population,
        local_epochs=local_epochs,
        cohort_size=cohort_size,
        lanes=lanes,
        seed=seed,
        shards=fixed,
        programs=build_round(
            lambda hyper: algorithm,
            feed,
            mesh,
            max_local=int(population.falling[0]),
            kind=type(source),
            shards=fixed,
        ),
        key=meshes.put(jax.random.key(seed), meshes.replicated(mesh)),
        stragglers=stragglers,
        hyper=(),
    )


def check_rows_of_clients(population: Population, num_rows: int) -> None:
    """Raise ValueError unless each client owns some of the table's rows."""
    first = 0
    for sizes in population.size_blocks():
        if (sizes <= 0).any():
            empty = (first + np.flatnonzero(sizes <= 0)[:5]).tolist()
            raise ValueError(f"every client must own an image, got none for {empty}.")
        first += len(sizes)
    if (last := population.offsets[-1]) > num_rows:
        raise ValueError(
            f"clients' rows must lie in the table's {num_rows}, got {last}."
        )
    if num_rows >= 2**31:
        raise ValueError(f"a table must have less than 2^31 rows, got {num_rows}.")


def _by_round(local_epochs: int | tuple[int, ...]) -> Callable:
    given = np.atleast_1d(local_epochs)
    is_whole = given.size and np.issubdtype(given.dtype, np.integer)
    if given.ndim > 1 or not is_whole:
        raise ValueError(
            "local_epochs must be a whole number, or one per round, got "
            f"{local_epochs}."
        )
    epochs = given.tolist()
    if min(epochs) < 0:
        raise ValueError(f"local_epochs must not be negative, got {local_epochs}.")
    return lambda round: epochs[min(round, len(epochs) - 1)]


def start(sim: Simulation, variables: PyTree) -> PyTree:
    """The server before round 0, on every client device, cut over `model`."""
    return model_axis.onto(sim.mesh, sim.algorithm.init(variables))


def open_store(sim: Simulation, server: PyTree, folder=None, **resume) -> Store:
    """The store that fits this algorithm's personal rows; `resume` as in `Store`."""
    key = jax.random.key(sim.seed)
    template = jax.eval_shape(sim.algorithm.init_personal, key, server)
    num_clients = sim.population.num_clients
    sharer = jax.process_index() if jax.process_count() > 1 else None
    with meshes.first_before_others("store"):
        return Store(template, num_clients, folder, sharer=sharer, **resume)


def play(
    sim: Simulation, server: PyTree, store: Store, round: int
) -> tuple[PyTree, Outcome]:
    """Train one round: -> (server after it, what happened); rows go to the store.

    Raises:
      FloatingPointError: see `put_away`.
    """
    return play_cohort(sim, server, store, cohort_of(sim, round))


def cohort_of(sim: Simulation, round: int) -> Cohort:
    """Who trains in a round: a sample, without stragglers that are dropped."""
    num_clients = sim.population.num_clients
    ids = sampling.sample(sim.seed, round, num_clients, sim.cohort_size)
    if sim.stragglers.are_dropped:
        ids = ids[active(sim.stragglers, ids, sim.seed, round)]
    return Cohort(ids, round)


def play_cohort(
    sim: Simulation, server: PyTree, store: Store, cohort: Cohort
) -> tuple[PyTree, Outcome]:
    """`play` of clients that the caller has chosen, each once and in any order.

    Canonical sums take them in the order of their ids, and so is the outcome.
    """
    sim.source.waited()  # before this round
    if sim.shards is not None:
        cohort = cohort._replace(ids=np.sort(cohort.ids))
    with compiled_beside(sim, server, store, cohort):
        work = assign(sim, server, store, cohort)
    server, fetched = train_work(sim, server, work, cohort.round)
    metrics = put_away(store, work, cohort, fetched, server)
    facts = metrics, work.extra.num_examples, work.plan, sim.source.waited()
    return server, Outcome(cohort.ids, *facts)


def train_work(
    sim: Simulation, server: PyTree, work: Work, round: int
) -> tuple[PyTree, tuple]:
    """-> (server, (rows [V', W, L, ...], metrics {name: [K]}) in host memory)."""
    check_memory(sim, server, work.rows)
    begun = begin(sim, [work], round, key=sim.key, hyper=sim.hyper)
    server, rows, metrics = train(sim, sim.programs, server, begun)
    rows = whole_rows(rows, begun.layouts[0], work.clients.shape[1])
    return server, (rows, metrics)


def assign(sim: Simulation, server: PyTree, store: Store, cohort: Cohort) -> Work:
    """Prepare and schedule a cohort, and fetch its rows."""
    ids = cohort.ids
    extra = no_extra(len(ids))
    if sim.algorithm.prepare:
        extra = sim.algorithm.prepare(server, sim.context(cohort))
        extra = extra._replace(num_examples=meshes.fetch(extra.num_examples))
    offset, num_local = sim.population.offsets[ids], sim.population.sizes(ids)
    sizes = num_local + extra.num_examples
    epochs = np.asarray(sim.local_epochs(cohort.round))
    epochs = epochs[ids] if epochs.ndim else epochs
    epochs = epochs_of(sim.stragglers, epochs, ids, sim.seed, cohort.round)
    steps = sim.feed.steps_per_epoch(sizes) * epochs
    most = {"local steps": steps.max(initial=0)}
    check_ranges("", most, {"local steps": (0, math.inf)})
    plan = schedule(
        steps,
        num_devices=sim.mesh.shape[meshes.CLIENTS],
        lanes=sim.lanes,
        shards=sim.shards,
        ids=ids,
    )
    each = Slots(
        client=ids,
        place=np.arange(len(ids)),
        is_new=1,
        offset=offset,
        num_local=num_local,
        num_extra=extra.num_examples,
        num_classes=sim.population.num_classes[ids],
        num_steps=steps,
        is_first=ids == sampling.first_of(ids, sim.seed, cohort.round),
    )
    slots = pack(each, plan.slots)
    clients = column(slots, "client")
    own = meshes.own_shards(sim.mesh, len(clients))
    if jax.process_count() > 1:  # who held a client before may be another process
        store.settle()
        meshes.barrier("rows are on disk")
    rows, is_new = store.gather(clients[own].reshape(-1))
    shape = (len(own), *clients.shape[1:])
    column(slots, "is_new")[own] = is_new.reshape(shape)
    rows = jax.tree.map(lambda x: x.reshape(shape + x.shape[1:]), rows)
    order = np.empty(len(ids) + 1, np.int32)  # the last one takes those of idle slots
    order[plan.slots.reshape(-1)] = np.arange(plan.slots.size)
    return Work(rows, slots, order[:-1], extra, clients, own, plan)


def put_away(
    store: Store, work: Work, cohort: Cohort, fetched: tuple, server: PyTree
) -> dict:
    """Hand a round's rows [V', W, L, ...] to the store; returns its metrics.

    Raises:
      FloatingPointError: when a metric, an update or a row of a client, or the server
        after the round, is not finite; nothing is put away.
    """
    (rows, found), round = fetched, cohort.round
    metrics = {name: x for name, x in found.items() if name != IS_FINITE}
    check_metrics(metrics, cohort.ids, round)
    check_updates(found[IS_FINITE], cohort.ids, round)
    check_dropped(metrics, round)
    check_state(server, f"round {round + 1}")
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), rows)
    others = ()
    if len(work.own) < len(work.clients):
        others = np.delete(work.clients, work.own, axis=0).reshape(-1)
    own = work.clients[work.own].reshape(-1)
    check_rows(rows, own, round)
    store.scatter(own, rows, round, others=others)
    return metrics
