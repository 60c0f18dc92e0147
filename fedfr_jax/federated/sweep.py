"""Vmapped sweeps: several runs in one compiled round, over seeds and hyperparameters.

A member of a sweep is a seed and a pytree of numbers. The round is vmapped over
(server, client states, cohort, key, hyper); the algorithm is built inside it from the
member's traced numbers, so a sweep can be over every argument that the algorithm's
factory does arithmetic with, but does not branch on. Each member samples its own cohort
and keeps its own store: member s trains what `sims[s]` alone would, up to rounding.
Segments of streamed examples hold every member's rows, those of equal cohorts once.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import Stream, place_examples
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.engine import (
    Round,
    build_one_call,
    compile_round,
    round_functions,
    row_access,
)
from fedfr_jax.federated.simulation import build_simulation
from fedfr_jax.federated.state import Runs
from fedfr_jax.types import Dataset, PyTree


def sweep(
    make: Callable,
    batching: Batching,
    dataset: Dataset | Stream,
    population: Population,
    *,
    hypers: Sequence[PyTree],
    seeds: Sequence[int],
    mesh: Mesh,
    **settings,
) -> Runs:
    """Combine the runs of (hypers[s], seeds[s]) into a sweep.

    Args:
      make: hyper -> Algorithm; called with a member's numbers, and with tracers.
      dataset: as in `build_simulation`; members of equal cohorts share what is
        streamed.
      hypers: S pytrees of floats, alike in structure.
      seeds: S seeds.
      settings: as in `build_simulation`.
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
    data = batching, place_examples(dataset, mesh), population
    sims = tuple(
        build_simulation(make(h), *data, mesh=mesh, seed=seed, **settings)
        for h, seed in zip(hypers, seeds, strict=True)
    )
    if sims[0].settings.systems.has_state:
        raise ValueError(
            "a vmapped sweep cannot have systems with profiles or sampling. Run its "
            "members one by one."
        )
    partial_sums = sims[0].settings.partial_sums
    functions = round_functions(
        make,
        batching,
        mesh,
        max_local=int(population.largest(1)[0]),
        kind=sims[0].data,
        shards=partial_sums,
        steps_per_loop=sims[0].steps_per_loop,
    )
    programs = compile_round(vmap_members(functions, mesh), mesh, partial_sums)
    hyper = jax.tree.map(lambda *x: np.asarray(x, np.float32), *hypers)
    key = jax.vmap(jax.random.key)(np.asarray(seeds, np.uint32))
    key, hyper = jax.device_put((key, hyper), meshes.replicated(mesh))
    return Runs(sims, programs, key, hyper, make)


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
