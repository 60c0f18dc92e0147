"""Several runs in one compiled round: seeds and hyper-parameters as one more axis.

A member of a sweep is a seed and a pytree of numbers. The round is vmapped over
(server, rows, cohort, key, hyper); the algorithm is made inside it, of the member's own
traced numbers, so that learning rate, proximal weight or server rate can all be swept,
whatever its factory does arithmetic on and not `if`. Each member draws its own cohort
and keeps its own store: member s plays what `sims[s]` alone would.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax.federated import sampling
from fedfr_jax.federated.client import Feed, Population, Table, pack
from fedfr_jax.federated.engine import build_round
from fedfr_jax.federated.simulation import (
    Outcome,
    Simulation,
    assign,
    open_store,
    put_away,
    simulation,
)
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.stream import resident
from fedfr_jax.types import Cohort, PyTree


class Sweep(NamedTuple):
    """S runs that share data, mesh, cohort size and shapes."""

    sims: tuple[Simulation, ...]  # member s alone
    make: Callable  # hyper -> Algorithm
    run: Callable  # build_round's function over a leading axis S
    key: jax.Array  # [S] keys of the seeds
    hyper: PyTree  # leaves [S]


def sweep(
    make: Callable,
    feed: Feed,
    table: Table,
    population: Population,
    *,
    hypers: Sequence[PyTree],
    seeds: Sequence[int],
    mesh,
    **options,
) -> Sweep:
    """Put the runs of (hypers[s], seeds[s]) together.

    Args:
      make: hyper -> Algorithm; called with a member's numbers, and with tracers.
      hypers: S pytrees of floats, alike in structure.
      seeds: S seeds.
      options: as in `simulation`.

    Raises:
      ValueError: when the numbers of members differ, in a run of several processes, or
        as `simulation` does.
    """
    if not 0 < len(hypers) == len(seeds):
        raise ValueError(
            f"hypers must be one per seed, got {len(hypers)} for {len(seeds)} seeds."
        )
    if jax.process_count() > 1:
        raise ValueError(f"a sweep must run in one process, got {jax.process_count()}.")
    whole = meshes.replicated(mesh)
    table = jax.device_put(resident(table, "a sweep"), whole)
    sims = tuple(
        simulation(make(h), feed, table, population, mesh=mesh, seed=s, **options)
        for h, s in zip(hypers, seeds, strict=True)
    )
    max_local = int(population.largest(1)[0])
    one = build_round(make, feed, mesh, max_local=max_local, shards=sims[0].shards)
    stacked = jax.tree.map(lambda *x: np.asarray(x, np.float32), *hypers)
    key = jax.vmap(jax.random.key)(np.asarray(seeds, np.uint32))
    return Sweep(
        sims=sims,
        make=make,
        run=jax.jit(
            jax.vmap(one, in_axes=(0, 0, 0, 0, 0, None, None, 0, 0)), donate_argnums=1
        ),
        key=jax.device_put(key, whole),
        hyper=jax.device_put(stacked, whole),
    )


def start_sweep(
    runs: Sweep, variables: PyTree, folders=None
) -> tuple[PyTree, list[Store]]:
    """Servers [S, ...] before round 0, all of one start, and the members' stores."""
    servers = jax.jit(jax.vmap(lambda hyper: runs.make(hyper).init(variables)))(
        runs.hyper
    )
    stores = [
        open_store(sim, member(servers, s), folders and folders[s])
        for s, sim in enumerate(runs.sims)
    ]
    return jax.device_put(servers, meshes.replicated(runs.sims[0].mesh)), stores


def member(servers: PyTree, s: int) -> PyTree:
    """The server of member s."""
    return jax.tree.map(lambda x: x[s], servers)


def play_sweep(
    runs: Sweep, servers: PyTree, stores: Sequence[Store], round: int
) -> tuple[PyTree, list[Outcome]]:
    """`play` of every member at once: -> (servers [S, ...], an outcome each)."""
    sims, works, cohorts = runs.sims, [], []
    for s, sim in enumerate(sims):
        ids = sampling.sample(
            sim.seed, round, len(sim.population.num_classes), sim.cohort_size
        )
        cohorts.append(Cohort(ids, round))
        works.append(assign(sim, member(servers, s), stores[s], cohorts[s]))
    mesh = sims[0].mesh
    inputs = [(work.rows, pack(work.slots), work.order, work.extra) for work in works]
    rows, slots, order, extra = jax.tree.map(lambda *x: np.stack(x), *inputs)
    cut = NamedSharding(mesh, P(None, meshes.CLIENTS))
    rows, slots = jax.device_put((rows, slots), cut)
    order, extra, number = jax.device_put(
        (order, extra, np.int32(round)), meshes.replicated(mesh)
    )
    servers, rows, metrics = runs.run(
        servers, rows, slots, order, extra, sims[0].table, number, runs.key, runs.hyper
    )
    rows, metrics = jax.device_get((rows, metrics))
    outcomes = []
    for s, (work, cohort) in enumerate(zip(works, cohorts, strict=True)):
        own = jax.tree.map(lambda x, s=s: x[s], (rows, metrics))
        found = put_away(stores[s], work, cohort, own)
        count = work.extra.num_examples
        outcomes.append(Outcome(cohort.ids, found, count, work.plan))
    return servers, outcomes
