"""Vmapped sweeps: several runs in one compiled round, over seeds and hyperparameters.

A member of a sweep is a seed and a pytree of numbers. The round is vmapped over
(server, client states, cohort, key, hyper); the algorithm is built inside it from the
member's traced numbers, so a sweep can be over every argument that the algorithm's
factory does arithmetic with, but does not branch on. Each member samples its own cohort
and keeps its own store: member s trains what `sims[s]` alone would, up to rounding.
Segments of streamed examples hold every member's rows, those of equal cohorts once.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import Stream, place_examples
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.engine import (
    CallInputs,
    Round,
    build_one_call,
    compile_round,
    round_functions,
    row_access,
)
from fedfr_jax.federated.many_rounds import load_call, store_call, train_call
from fedfr_jax.federated.model_parallel import placement
from fedfr_jax.federated.privacy.accountant import check_round
from fedfr_jax.federated.simulation import (
    RoundLog,
    Simulation,
    assign,
    build_simulation,
    cohort_of_round,
    finish_log,
    load_round,
    open_store,
    stack_segments,
    store_personal_state,
    train_segments,
    whole_rows,
)
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.systems.rounds import Systems
from fedfr_jax.types import Dataset, PyTree


class Sweep(NamedTuple):
    """S runs that share data, mesh, cohort size and shapes."""

    sims: tuple[Simulation, ...]  # member s alone
    build_member: Callable  # hyper -> Algorithm
    programs: Round  # of all members
    key: jax.Array  # [S] keys of the seeds
    hyper: PyTree  # leaves [S]


def sweep(
    make: Callable,
    feed: Batching,
    table: Dataset | Stream,
    population: Population,
    *,
    hypers: Sequence[PyTree],
    seeds: Sequence[int],
    mesh,
    **options,
) -> Sweep:
    """Combine the runs of (hypers[s], seeds[s]) into a sweep.

    Args:
      make: hyper -> Algorithm; called with a member's numbers, and with tracers.
      table: as in `build_simulation`; members of equal cohorts share what is streamed.
      hypers: S pytrees of floats, alike in structure.
      seeds: S seeds.
      options: as in `build_simulation`.
    """
    if not 0 < len(hypers) == len(seeds):
        raise ValueError(
            f"hypers must have one entry per seed, got {len(hypers)} for {len(seeds)} "
            "seeds."
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"a vmapped sweep must run in one process, got {jax.process_count()}. "
            "Remove --vmap, or use one process."
        )
    if options.get("systems", Systems()).has_world:
        raise ValueError(
            "a vmapped sweep cannot have systems with profiles or sampling. Run its "
            "members one by one."
        )
    whole = meshes.replicated(mesh)
    table = place_examples(table, mesh)
    sims = tuple(
        build_simulation(make(h), feed, table, population, mesh=mesh, seed=s, **options)
        for h, s in zip(hypers, seeds, strict=True)
    )
    functions = round_functions(
        make,
        feed,
        mesh,
        max_local=int(population.largest(1)[0]),
        kind=sims[0].data,
        shards=sims[0].num_partial_sums,
        steps_per_loop=sims[0].steps_per_loop,
    )
    hyper = jax.tree.map(lambda *x: np.asarray(x, np.float32), *hypers)
    key = jax.vmap(jax.random.key)(np.asarray(seeds, np.uint32))
    return Sweep(
        sims=sims,
        build_member=make,
        programs=compile_round(
            vmap_members(functions, mesh), mesh, sims[0].num_partial_sums
        ),
        key=jax.device_put(key, whole),
        hyper=jax.device_put(hyper, whole),
    )


def vmap_members(functions: Round, mesh: Mesh) -> Round:
    """vmap a round over S members, on the second axis of sharded inputs.

    They share a table; a member's slots have the places of its rows.
    """
    shared = (0, None, 0, 0)  # (extra, round, key, hyper)
    segment = 1, 1, None, shared  # rows, slots, table
    take, put = row_access(mesh)
    return build_one_call(
        start=jax.vmap(functions.start, (0, *segment), 1),
        run=jax.vmap(functions.run, (1, 0, *segment), 1),
        finish=jax.vmap(functions.finish, (0, 1, 1, 0, shared)),
        take=jax.vmap(take, (0, 1), 1),
        put=jax.vmap(put, (0, 1, 1), 0),
    )


def start_sweep(
    runs: Sweep, variables: PyTree, folders=None
) -> tuple[PyTree, list[Store]]:
    """Initial servers [S, ...] from the same variables, and each member's store."""
    init = lambda hyper: runs.build_member(hyper).init(variables)
    servers = jax.jit(jax.vmap(init, axis_size=len(runs.sims)))(runs.hyper)
    stores = [
        open_store(sim, member(servers, s), folders and folders[s])
        for s, sim in enumerate(runs.sims)
    ]
    return jax.device_put(servers, placement(runs.sims[0].mesh, servers, None)), stores


def member(servers: PyTree, s: int) -> PyTree:
    """Server of member s."""
    return jax.tree.map(lambda x: x[s], servers)


def run_sweep_round(
    runs: Sweep, servers: PyTree, stores: Sequence[Store], round: int
) -> tuple[PyTree, list[RoundLog]]:
    """Run a round of every member at once: (servers [S, ...], a log for each)."""
    sims, works, cohorts = runs.sims, [], []
    sims[0].data.input_wait()  # before this round
    for s, sim in enumerate(sims):
        check_round(sim.accountant, round)
        cohorts.append(cohort_of_round(sim, round))
        works.append(assign(sim, member(servers, s), stores[s], cohorts[s]))
    loaded = load_round(
        sims[0],
        works,
        round,
        key=runs.key,
        hyper=runs.hyper,
        tables=stack_member_data(sims, works),
        join=stack_segments,
    )
    servers, parts, metrics = train_segments(sims[0], runs.programs, servers, loaded)
    logs, input_wait = [], sims[0].data.input_wait()
    for s, (sim, work, cohort) in enumerate(zip(sims, works, cohorts, strict=True)):
        rows = [jax.tree.map(lambda x, s=s: x[:, s], part) for part in parts]
        member_metrics = store_personal_state(
            stores[s],
            work,
            cohort,
            whole_rows(rows, loaded.layouts[s], work.clients.shape[1]),
            member(metrics, s),
            member(servers, s),
            sim.algorithm.min_kept,
        )
        log = RoundLog(
            cohort.ids, member_metrics, work.added.num_added, work.plan, input_wait
        )
        logs.append(finish_log(sim, cohort, log))
    return servers, logs


def run_sweep_rounds(
    runs: Sweep,
    servers: PyTree,
    stores: Sequence[Store],
    first: int,
    count: int,
    *,
    max_rounds: int = 0,
) -> tuple[PyTree, list[list[RoundLog]]]:
    """`simulate_rounds` of every member at once: (servers [S, ...], logs of each)."""
    pairs = list(zip(runs.sims, stores, strict=True))
    calls = [
        load_call(sim, store, first, count, max_rounds or count) for sim, store in pairs
    ]
    stacked = calls[0]._replace(
        rows=stack_segments([call.rows for call in calls], 0),
        inputs=CallInputs(
            slots=np.stack([call.inputs.slots for call in calls], 2),
            rows=np.stack([call.inputs.rows for call in calls], 2),
            order=np.stack([call.inputs.order for call in calls], 1),
        ),
        extra=stack_segments([call.extra for call in calls], 0),
    )
    servers, rows, metrics, is_finite = train_call(
        runs.sims[0], runs.programs, servers, stacked, runs.key, runs.hyper
    )
    logs = []
    for s, ((sim, store), call) in enumerate(zip(pairs, calls, strict=True)):
        member_metrics = {name: x[:, s] for name, x in metrics.items()}
        logs.append(
            store_call(sim, store, call, member(rows, s), member_metrics, is_finite)
        )
    return servers, logs


def stack_member_data(sims: Sequence[Simulation], works: Sequence) -> list[int]:
    """Index of the segment's data set that each member reads: [S], from 0.

    Members of one seed, or all if cohorts are the whole population, train the same
    clients in the same places; unless the server adds examples, they share one.
    """
    sim = sims[0]
    if works[0].added.added_rows.shape[1]:
        return list(range(len(sims)))
    is_all = sim.cohort_size == sim.population.num_clients
    is_all = is_all and not sim.stragglers.are_dropped
    seeds = [0 if is_all else sim.seed for sim in sims]
    return [sorted(set(seeds)).index(seed) for seed in seeds]
