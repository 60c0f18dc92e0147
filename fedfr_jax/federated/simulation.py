"""Simulations: the parts of a run, or of the runs of a vmapped sweep, combined.

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
from fedfr_jax.federated import model_parallel
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.engine import compile_round, round_functions, vmap_members
from fedfr_jax.federated.participation import check_participation, with_systems
from fedfr_jax.federated.privacy.mechanism import accountant_of, check_prepare
from fedfr_jax.federated.row_exchange import Objects, RowExchange
from fedfr_jax.federated.schedule import choose_steps_per_loop
from fedfr_jax.federated.settings import AUTO, Settings
from fedfr_jax.federated.state import Runs, Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.streaming import place_data
from fedfr_jax.schema import check_fields
from fedfr_jax.types import Algorithm, Dataset, PyTree


def build_simulation(
    algorithm: Algorithm,
    batching: Batching,
    dataset: Dataset | Stream,
    population: Population,
    settings: Settings = Settings(),  # noqa: B008 (a constant)
    *,
    mesh: Mesh,
) -> Simulation:
    """Check the parts of a simulation, and combine them.

    Args:
      dataset: host or device arrays, copied to every device of the mesh once; or a
        `stream`, read while a round is trained.
    """
    check_fields("", settings)
    num_clients = population.num_clients
    check_rows_of_clients(population, dataset.num_examples)
    settings = check_participation(settings, algorithm, num_clients)
    check_prepare(algorithm)
    sampling, cohort_size = settings.sampling, settings.cohort_size
    num_asked = settings.systems.num_asked(cohort_size)
    sizes = population.largest(sampling.max_cohort(num_clients, num_asked))
    population = population._replace(sizes_descending=sizes)
    inner, algorithm = algorithm, with_systems(algorithm, settings.systems, num_clients)
    data = place_data(mesh, dataset)
    lengths = lengths_of_loops(settings, mesh, batching, population)
    functions = round_functions(
        lambda hyper: algorithm,
        batching,
        mesh,
        max_local=int(sizes[0]),
        kind=data,
        partial_sums=settings.partial_sums,
        steps_per_loop=lengths,
    )
    key = jax.random.key(settings.seed)
    return Simulation(
        algorithm=algorithm,
        batching=batching,
        mesh=mesh,
        data=data,
        population=population,
        settings=settings,
        programs=compile_round(functions, mesh, settings.partial_sums),
        key=meshes.put_global(key, meshes.replicated(mesh)),
        hyper=(),
        steps_per_loop=lengths,
        accountant=accountant_of(algorithm, sampling, num_clients, cohort_size),
        inner_algorithm=inner,
    )


def sweep(
    make: Callable,
    batching: Batching,
    dataset: Dataset | Stream,
    population: Population,
    settings: Settings = Settings(),  # noqa: B008 (a constant)
    *,
    hypers: Sequence[PyTree],
    seeds: Sequence[int],
    mesh: Mesh,
    has_shared_slots: bool = False,
) -> Runs:
    """Combine the runs of (hypers[s], seeds[s]) into a sweep.

    Args:
      make: hyper -> Algorithm; called with a member's numbers, and with tracers.
      dataset: as in `build_simulation`; members of equal cohorts share what is
        streamed.
      hypers: S pytrees of floats, alike in structure.
      seeds: S seeds, in place of that of `settings`.
      has_shared_slots: of equal seeds, see `Runs`; nothing is prepared by a server.
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
        build_simulation(make(h), *data, settings._replace(seed=seed), mesh=mesh)
        for h, seed in zip(hypers, seeds, strict=True)
    )
    if settings.systems.has_state or settings.systems.footprint is not None:
        raise ValueError(
            "a vmapped sweep cannot have systems with profiles, sampling or footprint. "
            "Run its members one by one."
        )
    partial_sums = settings.partial_sums
    functions = round_functions(
        make,
        batching,
        mesh,
        max_local=int(population.largest(1)[0]),
        kind=sims[0].data,
        partial_sums=partial_sums,
        steps_per_loop=sims[0].steps_per_loop,
    )
    programs = compile_round(
        vmap_members(functions, mesh, has_shared_slots), mesh, partial_sums
    )
    hyper = jax.tree.map(lambda *x: np.asarray(x, np.float32), *hypers)
    key = jax.vmap(jax.random.key)(np.asarray(seeds, np.uint32))
    key = key[0] if has_shared_slots else key
    key, hyper = jax.device_put((key, hyper), meshes.replicated(mesh))
    return Runs(sims, programs, key, hyper, make, has_shared_slots)


def lengths_of_loops(
    settings: Settings, mesh: Mesh, batching: Batching, population: Population
) -> tuple[int, ...]:
    """Lengths of counted loops, descending; () for none.

    On GPUs "auto" is the best for 1024 of the clients over 16 rounds.
    """
    if settings.steps_per_loop != AUTO:
        lengths = tuple(np.ravel(settings.steps_per_loop).tolist())
        return () if lengths == (1,) else lengths
    if mesh.devices.flat[0].platform not in meshes.GPUS:
        return ()
    ids = np.unique(np.linspace(0, population.num_clients - 1, 1024).astype(np.int64))
    per_epoch = batching.steps_per_epoch(population.sizes(ids))
    epochs = [np.asarray(settings.epochs(number)) for number in range(16)]
    steps = [per_epoch * (x[ids] if x.ndim else x) for x in epochs]
    return choose_steps_per_loop(np.concatenate(steps))


def check_rows_of_clients(population: Population, num_rows: int) -> None:
    """Raise ValueError unless each client has some of the data set's rows."""
    first = 0
    for sizes in population.size_chunks():
        if (sizes <= 0).any():
            empty = (first + np.flatnonzero(sizes <= 0)[:5]).tolist()
            raise ValueError(
                f"every client must have an example, got none for {empty}."
            )
        first += len(sizes)
    if (last := population.offsets[-1]) > num_rows:
        raise ValueError(
            f"clients' rows must be among the data set's {num_rows}, got {last}."
        )
    if num_rows >= 2**31:
        raise ValueError(f"a data set must have less than 2^31 rows, got {num_rows}.")


def start_simulation(sim: Simulation, variables: PyTree) -> PyTree:
    """Initial server on every client device, sharded over `model`."""
    return model_parallel.put_on_mesh(sim.mesh, sim.algorithm.init(variables))


def open_store(
    sim: Simulation,
    server: PyTree,
    folder=None,
    *,
    objects: Objects | None = None,
    **resume,
) -> Store:
    """Open the store for this algorithm's client states; `resume` as in `Store`.

    Args:
      objects: of processes without a common folder.
    """
    key = jax.random.key(sim.settings.seed)
    template = jax.eval_shape(sim.algorithm.init_personal, key, server)
    num_clients = sim.population.num_clients
    here, count = jax.process_index(), jax.process_count()
    sharer = here if count > 1 and objects is None else None
    if count > 1 and objects is not None:
        resume["exchange"] = RowExchange(objects, here, count)
    with meshes.first_process_first("store"):
        return Store(template, num_clients, folder, sharer=sharer, **resume)
