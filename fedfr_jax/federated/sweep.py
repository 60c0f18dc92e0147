"""Several runs in one compiled round: seeds and hyper-parameters as one more axis.

A member of a sweep is a seed and a pytree of numbers. The round is vmapped over
(server, rows, cohort, key, hyper); the algorithm is made inside it, of the member's own
traced numbers, so that learning rate, proximal weight or server rate can all be swept,
whatever its factory does arithmetic on and not `if`. Each member draws its own cohort
and keeps its own store: member s plays what `sims[s]` alone would. Of a stream, each
segment of the round holds every member's rows, those of equal cohorts once.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax.federated import sampling
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.compiling import Program, compiler_options
from fedfr_jax.federated.engine import round_function
from fedfr_jax.federated.layout import lay_out, size_of
from fedfr_jax.federated.memory import guarded
from fedfr_jax.federated.model_axis import places, places_of_rows
from fedfr_jax.federated.segments import (
    Segments,
    compiled,
    part_of,
    pieces,
    rows_of,
    segment_functions,
    train_all,
    whole_rows,
)
from fedfr_jax.federated.simulation import (
    Outcome,
    Simulation,
    assign,
    open_store,
    put_away,
    simulation,
)
from fedfr_jax.federated.store import Store
from fedfr_jax.feed import Feed
from fedfr_jax.stream import Stream, placed, waited
from fedfr_jax.types import Cohort, Dataset, PyTree


class Sweep(NamedTuple):
    """S runs that share data, mesh, cohort size and shapes."""

    sims: tuple[Simulation, ...]  # member s alone
    make: Callable  # hyper -> Algorithm
    run: Callable  # build_round's function over a leading axis S
    key: jax.Array  # [S] keys of the seeds
    hyper: PyTree  # leaves [S]
    segments: Segments | None = None  # instead of `run`, for a Stream


def sweep(
    make: Callable,
    feed: Feed,
    table: Dataset | Stream,
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
      table: as in `simulation`; members of equal cohorts share what is streamed.
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
    table = placed(table, mesh)
    sims = tuple(
        simulation(make(h), feed, table, population, mesh=mesh, seed=s, **options)
        for h, s in zip(hypers, seeds, strict=True)
    )
    sizes = {"max_local": int(population.largest(1)[0]), "shards": sims[0].shards}
    segments = None
    if isinstance(table, Stream):
        functions = segment_functions(make, feed, mesh, **sizes)
        segments = compiled(over_members(functions), mesh, sims[0].shards)
    one = round_function(make, feed, mesh, **sizes)
    stacked = jax.tree.map(lambda *x: np.asarray(x, np.float32), *hypers)
    key = jax.vmap(jax.random.key)(np.asarray(seeds, np.uint32))
    return Sweep(
        sims=sims,
        make=make,
        run=Program(
            jax.jit(
                jax.vmap(one, in_axes=(0, 0, 0, 0, 0, None, None, 0, 0)),
                donate_argnums=1,
                compiler_options=compiler_options(mesh, sims[0].shards),
            )
        ),
        key=jax.device_put(key, whole),
        hyper=jax.device_put(stacked, whole),
        segments=segments,
    )


def over_members(functions: Segments) -> Segments:
    """The pieces of S rounds; in what the devices cut, S is the second axis.

    They share a table, in which `starts` say where a member's rows lie.
    """
    shared = (0, None, 0, 0)  # (extra, round, key, hyper)
    return Segments(
        start=jax.vmap(functions.start, (0, 1, None, shared), 1),
        run=jax.vmap(functions.run, (1, 0, 1, None, shared), 1),
        finish=jax.vmap(functions.finish, (0, 1, 1, 0, None, 0)),
    )


def start_sweep(
    runs: Sweep, variables: PyTree, folders=None
) -> tuple[PyTree, list[Store]]:
    """Servers [S, ...] before round 0, all of one start, and the members' stores."""
    init = lambda hyper: runs.make(hyper).init(variables)
    servers = jax.jit(jax.vmap(init, axis_size=len(runs.sims)))(runs.hyper)
    stores = [
        open_store(sim, member(servers, s), folders and folders[s])
        for s, sim in enumerate(runs.sims)
    ]
    return jax.device_put(servers, places(runs.sims[0].mesh, servers, None)), stores


def member(servers: PyTree, s: int) -> PyTree:
    """The server of member s."""
    return jax.tree.map(lambda x: x[s], servers)


def play_sweep(
    runs: Sweep, servers: PyTree, stores: Sequence[Store], round: int
) -> tuple[PyTree, list[Outcome]]:
    """`play` of every member at once: -> (servers [S, ...], an outcome each).

    Raises:
      MemoryError: when lanes of all members do not fit, see `guarded`.
    """
    sims, works, cohorts = runs.sims, [], []
    waited(sims[0].table)  # before this round
    for s, sim in enumerate(sims):
        ids = sampling.sample(
            sim.seed, round, len(sim.population.num_classes), sim.cohort_size
        )
        cohorts.append(Cohort(ids, round))
        works.append(assign(sim, member(servers, s), stores[s], cohorts[s]))
    train = _in_segments if runs.segments else _at_once
    servers, fetched = train(runs, servers, works, round)
    outcomes, stood = [], waited(sims[0].table)
    for s, (work, cohort) in enumerate(zip(works, cohorts, strict=True)):
        found = put_away(stores[s], work, cohort, fetched[s])
        count = work.extra.num_examples
        outcomes.append(Outcome(cohort.ids, found, count, work.plan, stood))
    return servers, outcomes


def _at_once(runs, servers, works, round):
    """-> (servers [S, ...], each member's (rows, metrics) in host memory)."""
    sim = runs.sims[0]
    inputs = [(work.rows, work.slots, work.order, work.extra) for work in works]
    rows, slots, order, extra = _stacked(inputs)
    rows = jax.device_put(rows, places_of_rows(sim.mesh, rows, None))
    slots = jax.device_put(slots, NamedSharding(sim.mesh, P(None, meshes.CLIENTS)))
    order, extra, number = jax.device_put(
        (order, extra, np.int32(round)), meshes.replicated(sim.mesh)
    )
    with guarded(sim, runs.run) as run:
        servers, *fetched = run(
            servers, rows, slots, order, extra, sim.table, number, runs.key, runs.hyper
        )
        fetched = jax.device_get(fetched)
    return servers, [member(fetched, s) for s in range(len(works))]


def _in_segments(runs, servers, works, round):
    """`_at_once`, segment by segment."""
    sim = runs.sims[0]
    source = table_of_members(runs.sims, works)
    size = size_of(sim, works, max(source) + 1)
    num_devices = sim.mesh.shape[meshes.CLIENTS]
    layouts = [lay_out(work, num_devices, size) for work in works]
    examples = [jax.device_get(work.extra.examples) for work in works]

    def make(i, a):
        parts = [part_of(layout, sim.mesh, size, i, a) for layout in layouts]
        tables = [
            rows_of(sim.table, parts[s], examples[s], size.rows)
            for s in np.unique(source, return_index=True)[1]
        ]
        table = jax.tree.map(lambda *x: np.concatenate(x), *tables)
        parts = [
            part._replace(starts=part.starts + np.int32(k * size.rows))
            for part, k in zip(parts, source, strict=True)
        ]
        return _stacked(parts, axis=1), table

    order, extra = _stacked(
        [(layout.order, w.extra) for layout, w in zip(layouts, works, strict=True)]
    )
    order, extra, number = jax.device_put(
        (order, extra, np.int32(round)), meshes.replicated(sim.mesh)
    )
    shared = (extra, number, runs.key, runs.hyper)
    with guarded(sim, runs.segments.run) as run:
        segments = runs.segments._replace(run=run)
        loaded = pieces(sim, make, size.segments)
        servers, rows, metrics = train_all(segments, loaded, servers, order, shared)
    fetched = []
    for s, (layout, work) in enumerate(zip(layouts, works, strict=True)):
        own = [jax.tree.map(lambda x, s=s: x[:, s], part) for part in rows]
        fetched.append((whole_rows(own, layout, work), member(metrics, s)))
    return servers, fetched


def table_of_members(sims: Sequence[Simulation], works: Sequence) -> list[int]:
    """Which of a segment's tables each member reads: [S], from 0.

    Members of one seed, or all if cohorts are everybody, train the same clients in the
    same places; unless the server adds examples, their rows are then the same.
    """
    sim = sims[0]
    if works[0].extra.examples.shape[1]:
        return list(range(len(sims)))
    is_all = sim.cohort_size == len(sim.population.num_classes)
    seeds = [0 if is_all else sim.seed for sim in sims]
    return [sorted(set(seeds)).index(seed) for seed in seeds]


def _stacked(trees, axis=0):
    return jax.tree.map(lambda *x: np.stack(x, axis), *trees)
