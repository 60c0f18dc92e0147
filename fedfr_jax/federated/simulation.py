"""A round as the host sees it: sample, prepare, schedule, train, put rows away."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.federated import sampling
from fedfr_jax.federated.client import Feed, Population, Slots, Table
from fedfr_jax.federated.engine import build_round, no_extra
from fedfr_jax.federated.schedule import Plan, schedule
from fedfr_jax.federated.store import Store
from fedfr_jax.types import Algorithm, Cohort, PyTree


class Simulation(NamedTuple):
    """Everything of a federated run that does not change from round to round."""

    algorithm: Algorithm
    feed: Feed
    mesh: Mesh
    table: Table  # replicated on the mesh
    population: Population
    local_epochs: Callable  # round -> E, or one per client [N]
    cohort_size: int  # K
    lanes: int  # L
    seed: int
    run: Callable  # build_round's function


class Outcome(NamedTuple):
    """What one round leaves for the log."""

    ids: np.ndarray  # [K] int64, ascending
    metrics: dict[str, np.ndarray]  # {name: [K]}
    num_extra: np.ndarray  # [K] int32 examples added by the server
    plan: Plan


def simulation(
    algorithm: Algorithm,
    feed: Feed,
    table: Table,
    population: Population,
    *,
    mesh: Mesh,
    cohort_size: int = 0,
    local_epochs: int | tuple[int, ...] | Callable = 1,
    lanes: int = 1,
    seed: int = 0,
) -> Simulation:
    """Check the pieces and put them together.

    Args:
      table: host or device arrays; copied to every device of the mesh once.
      cohort_size: K in [1, N]; 0 takes all clients in every round.
      local_epochs: passes over a client's examples; a tuple gives one per round and
        its last entry stays; a function of the round gives a number, or an array [N]
        of one per client.
      lanes: clients trained side by side on a device, L >= 1.

    Raises:
      ValueError: when a client owns no example, or a size is out of range.
    """
    num_clients = len(population.num_classes)
    sizes = np.diff(population.offsets)
    if (sizes < 1).any():
        empty = np.flatnonzero(sizes < 1)[:5].tolist()
        raise ValueError(f"every client must own an image, got none for {empty}.")
    if population.offsets[-1] > len(table.images):
        raise ValueError(
            f"clients' rows must lie in the table's {len(table.images)}, "
            f"got {population.offsets[-1]}."
        )
    if lanes < 1:
        raise ValueError(f"lanes must be at least 1, got {lanes}.")
    cohort_size = cohort_size or num_clients
    sampling.sample(seed, 0, num_clients, cohort_size)
    if not callable(local_epochs):
        local_epochs = _by_round(local_epochs)
    return Simulation(
        algorithm=algorithm,
        feed=feed,
        mesh=mesh,
        table=jax.device_put(table, meshes.replicated(mesh)),
        population=population,
        local_epochs=local_epochs,
        cohort_size=cohort_size,
        lanes=lanes,
        seed=seed,
        run=build_round(algorithm, feed, mesh, max_local=int(sizes.max()), seed=seed),
    )


def _by_round(local_epochs: int | tuple[int, ...]) -> Callable:
    epochs = (local_epochs,) if isinstance(local_epochs, int) else tuple(local_epochs)
    if not epochs or min(epochs) < 0:
        raise ValueError(f"local_epochs must not be negative, got {local_epochs}.")
    return lambda round: epochs[min(round, len(epochs) - 1)]


def start(sim: Simulation, variables: PyTree) -> PyTree:
    """The server before round 0, replicated on the mesh."""
    return jax.device_put(sim.algorithm.init(variables), meshes.replicated(sim.mesh))


def open_store(sim: Simulation, server: PyTree, folder=None, **resume) -> Store:
    """The store that fits this algorithm's personal rows; `resume` as in `Store`."""
    key = jax.random.key(sim.seed)
    template = jax.eval_shape(sim.algorithm.init_personal, key, server)
    num_clients = len(sim.population.num_classes)
    return Store(template, num_clients, folder, **resume)


def play(
    sim: Simulation, server: PyTree, store: Store, round: int
) -> tuple[PyTree, Outcome]:
    """Train one round: -> (server after it, what happened); rows go to the store."""
    num_clients = len(sim.population.num_classes)
    ids = sampling.sample(sim.seed, round, num_clients, sim.cohort_size)
    extra = no_extra(len(ids))
    if sim.algorithm.prepare:
        extra = sim.algorithm.prepare(server, sim, Cohort(ids, round))
    num_extra = np.asarray(extra.num_examples)
    sizes = np.diff(sim.population.offsets)[ids] + num_extra
    epochs = np.broadcast_to(sim.local_epochs(round), num_clients)[ids]
    steps = sim.feed.steps_per_epoch(sizes) * epochs
    plan = schedule(steps, num_devices=sim.mesh.shape[meshes.CLIENTS], lanes=sim.lanes)
    slots, slot_ids = _slots(sim.population, ids, plan, num_extra, steps)
    rows, is_new = store.gather(slot_ids.reshape(-1))
    rows = jax.tree.map(lambda x: x.reshape(plan.slots.shape + x.shape[1:]), rows)
    slots = slots._replace(is_new=is_new.reshape(plan.slots.shape))
    order = np.argsort(plan.slots.reshape(-1), kind="stable")[-len(ids) :]
    rows, slots = jax.device_put((rows, slots), meshes.over_clients(sim.mesh))
    order = jax.device_put(order.astype(np.int32), meshes.replicated(sim.mesh))
    extra = jax.device_put(extra, meshes.replicated(sim.mesh))
    number = jax.device_put(jnp.int32(round), meshes.replicated(sim.mesh))
    server, rows, result = sim.run(server, rows, slots, order, extra, sim.table, number)
    rows = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[3:]), rows)
    store.scatter(slot_ids.reshape(-1), rows, round)
    metrics = {name: np.asarray(x) for name, x in result.metrics.items()}
    return server, Outcome(ids, metrics, num_extra, plan)


def _slots(population, ids, plan, num_extra, steps) -> tuple[Slots, np.ndarray]:
    """Numbers of every slot, and the client ids, [A, W, L] (-1 where idle)."""
    idle = plan.slots < 0
    place = np.where(idle, 0, plan.slots)
    client = np.where(idle, -1, ids[place])
    number = lambda x: np.where(idle, 0, x[place]).astype(np.int32)
    slots = Slots(
        client=client.astype(np.int32),
        place=place.astype(np.int32),
        is_new=idle,
        offset=population.offsets[:-1][np.maximum(client, 0)].astype(np.int32),
        num_local=number(np.diff(population.offsets)[ids]),
        num_extra=number(num_extra),
        num_classes=number(population.num_classes[ids]),
        num_steps=number(steps),
    )
    return slots, client
