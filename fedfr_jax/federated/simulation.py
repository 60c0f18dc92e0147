"""Host side of a round: sample, prepare, schedule, train, store."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

import jax
import numpy as np
from annotated_types import MinLen
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import Stream
from fedfr_jax.federated import model_parallel
from fedfr_jax.federated.client import Population, SlotInputs, column, pack
from fedfr_jax.federated.communication import count_work
from fedfr_jax.federated.engine import (
    IS_FINITE,
    Round,
    compile_round,
    empty_prepared,
    round_functions,
)
from fedfr_jax.federated.finite import (
    check_dropped,
    check_metrics,
    check_rows,
    check_state,
    check_updates,
)
from fedfr_jax.federated.model_parallel import row_placement
from fedfr_jax.federated.privacy.accountant import check_round
from fedfr_jax.federated.privacy.mechanism import accountant_of, check_prepare
from fedfr_jax.federated.programs import (
    check_memory,
    check_memory_on_call,
    compile_in_background,
)
from fedfr_jax.federated.sampling import (
    Sampling,
    check_built_for,
    check_sampling,
    sample_clients,
)
from fedfr_jax.federated.schedule import (
    Schedule,
    build_schedule,
    choose_steps_per_loop,
    random_client,
)
from fedfr_jax.federated.state import Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.streaming import (
    Layout,
    RoundInputs,
    StreamShape,
    build_layout,
    place_data,
)
from fedfr_jax.federated.systems.asynchronous import next_buffer
from fedfr_jax.federated.systems.rounds import (
    Systems,
    after_round,
    begin_client,
    check_systems,
    check_together,
    in_world,
    next_cohort,
    with_participation,
)
from fedfr_jax.federated.systems.state import WithWorld, as_seconds, plain_server
from fedfr_jax.federated.systems.stragglers import (
    Stragglers,
    active_clients,
    check_stragglers,
    client_epochs,
    num_trained,
)
from fedfr_jax.ranges import MAX, Count, Seed, Whole
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, Cohort, Dataset, Participation, Prepared, PyTree

region = jax.profiler.TraceAnnotation  # names the host's work in a profile


class LoadedRound(NamedTuple):
    """Arguments of a `Round`'s functions."""

    segments: Iterator[tuple]  # of (rows, slots, table), loaded lazily
    size: StreamShape
    order: jax.Array
    shared: tuple
    layouts: list[Layout]

    def in_one_call(self, server: PyTree) -> tuple:
        """Arguments of `Round.run_whole`, for a round with one segment."""
        ((rows, slots, table),) = self.segments
        return server, rows, slots, self.order, table, self.shared


def single(trees: Sequence[PyTree], axis: int) -> PyTree:
    """The only tree of `trees`, for a single run."""
    del axis
    (tree,) = trees
    return tree


def stack_segments(trees: Sequence[PyTree], axis: int) -> PyTree:
    """Stack trees of host arrays along a new axis, for the members of a sweep."""
    return jax.tree.map(lambda *x: np.stack(x, axis), *trees)


def load_round(
    sim: Simulation,
    works: Sequence[RoundInputs],
    round: int,
    *,
    key: jax.Array,
    hyper: PyTree,
    tables: Sequence[int] = (0,),
    join: Callable = single,
) -> LoadedRound:
    """Put the inputs of one round, or of a sweep's members, on the devices.

    Args:
      works: `RoundInputs` of each member, as many as `join` takes.
      key, hyper: of all members, on the mesh.
      tables: which of a segment's tables each member reads, from 0.
    """
    size = sim.data.size_of(works, sim.largest, max(tables) + 1)
    layouts = [
        build_layout(work, sim.mesh, size, table * size.rows)
        for work, table in zip(works, tables, strict=True)
    ]
    # The slots have the numbers of added examples.
    extras = [work.added._replace(num_added=()) for work in works]
    if size.room is not None:
        extras = [x._replace(added_rows=x.added_rows[:, : size.room]) for x in extras]
    shared = join([x.order for x in layouts], 0), join(extras, 0), np.int32(round)
    order, extra, number = meshes.put_numbers(shared, meshes.replicated(sim.mesh))
    first_readers = [list(tables).index(table) for table in sorted(set(tables))]
    segments = sim.data.segments(
        size,
        segment_loader(layouts, size, sim.mesh, join),
        [(layouts[s], works[s].added.added_rows) for s in first_readers],
    )
    return LoadedRound(segments, size, order, (extra, number, key, hyper), layouts)


def segment_loader(
    layouts: list[Layout], size: StreamShape, mesh: Mesh, join: Callable
) -> Callable:
    """Build i -> (client states, slots) of segment i on the devices."""
    count, cut = mesh.shape[meshes.CLIENTS], meshes.over_clients(mesh)

    def load(i):
        waves = slice(i * size.waves, (i + 1) * size.waves)
        parts = [
            jax.tree.map(lambda x: x[:, waves], (layout.rows, layout.slots))
            for layout in layouts
        ]
        rows, slots = join(parts, 1)
        places = row_placement(mesh, rows, is_stacked=join is stack_segments)
        rows = meshes.put_local(rows, places, count)
        return rows, meshes.put_numbers(slots, cut)

    return load


def train_segments(
    sim: Simulation, programs: Round, server: PyTree, loaded: LoadedRound
) -> tuple:
    """Train a loaded round, segment by segment.

    Returns:
      (server, personal rows [A', ...] of each segment and metrics {name: [K]} in host
      memory).
    """
    if loaded.size.segments == 1:
        with check_memory_on_call(sim, programs.run_whole) as whole:
            server, rows, metrics = whole(*loaded.in_one_call(server))
            return server, [meshes.fetch_local(rows)], meshes.fetch(metrics)
    total, outputs, new_rows = None, [], []
    with check_memory_on_call(sim, programs.run) as run:
        for rows, slots, table in loaded.segments:
            segment = rows, slots, table, loaded.shared
            if total is None:
                total = programs.start(server, *segment)
            total, output = run(total, server, *segment)
            # Those of the segment before are fetched while this one trains.
            new_rows[-1:] = meshes.fetch_local(new_rows[-1:])
            new_rows.append(output.personal)
            outputs.append(output._replace(personal=()))
            jax.block_until_ready(output.weight)  # so that at most two tables exist
            del rows, slots, table, segment
        new_rows[-1:] = meshes.fetch_local(new_rows[-1:])
        server, metrics = programs.finish(
            server, total, outputs, loaded.order, loaded.shared
        )
        return server, new_rows, meshes.fetch(metrics)


def whole_rows(rows: list, layout: Layout, waves: int) -> PyTree:
    """Concatenate segments' client states [A', w, L, ...] to [V', W, L, ...]."""

    def in_one(*x):
        x = np.concatenate(x, axis=1)[:, : layout.num_waves] if len(x) > 1 else x[0]
        return x.reshape(-1, waves, *x.shape[2:])

    return jax.tree.map(in_one, *rows)


DEFAULT_PARTIAL_SUMS = 8
AUTO = "auto"


class RoundLog(NamedTuple):
    """Results of one round, of the K clients whose update was received."""

    ids: np.ndarray  # [K] int64, in the order of all other arrays
    metrics: dict[str, np.ndarray]  # {name: [K]}
    num_added: np.ndarray  # [K] int32 examples added by the server
    schedule: Schedule
    input_wait_seconds: float = 0.0  # spent waiting for streamed examples
    # {name: number} of the round: absent clients, epsilon, simulated time
    counts: Mapping[str, float] = MappingProxyType({})


@checked
def build_simulation(
    algorithm: Algorithm,
    feed: Batching,
    table: Dataset | Stream,
    population: Population,
    *,
    mesh: Mesh,
    cohort_size: Whole = 0,
    local_epochs: Whole | Annotated[tuple[Whole, ...], MinLen(1)] | Callable = 1,
    clients_per_device: Count = 1,
    seed: Seed = 0,
    reproducible_sum: bool = False,
    num_partial_sums: Count = DEFAULT_PARTIAL_SUMS,
    stragglers: Stragglers = Stragglers(),  # noqa: B008 (a constant)
    systems: Systems = Systems(),  # noqa: B008 (a constant)
    sampling: Sampling = Sampling(),  # noqa: B008 (a constant)
    steps_per_loop: Count | tuple[Count, ...] | Literal["auto"] = AUTO,
) -> Simulation:
    """Check the parts of a simulation, and combine them.

    Args:
      table: host or device arrays, copied to every device of the mesh once; or a
        `stream`, read while a round is trained.
      cohort_size: K in [1, N]; 0 takes all clients in every round.
      local_epochs: passes over a client's examples; a tuple gives one per round and
        its last entry stays; a function of the round gives a number, or an array [N]
        of one per client.
      clients_per_device: clients trained in parallel on a device, L >= 1.
      reproducible_sum: whether sums over clients have the same bits on any number of
        devices and in any order of the cohort (clients_per_device still matters;
        FedDANE's gradients are added up before the round, device by device).
      num_partial_sums: V of reproducible sums, best a multiple of every number of
        devices that will be used; a cohort of K has places for K rounded up to V x
        clients_per_device, and a device holds V / devices of the sums.
      stragglers: how many of a cohort train for fewer epochs, or are dropped.
      systems: how clients fail.
      sampling: how a round's clients are sampled.
      steps_per_loop: local steps of loops whose length the compiler knows: a length, or
        several in descending order, 1 for none; "auto" chooses them on GPUs.
    """
    num_clients = population.num_clients
    check_rows_of_clients(population, table.num_examples)
    check_built_for(algorithm, num_clients)
    fixed = num_partial_sums if reproducible_sum else None
    cohort_size = systems.num_counted(cohort_size or num_clients)
    check_sampling(sampling, num_clients, cohort_size)
    check_systems(systems, num_clients, cohort_size)
    check_together(systems, stragglers, sampling, algorithm)
    check_prepare(algorithm)
    algorithm.check_cohort(num_trained(stragglers, cohort_size))
    places = sampling.max_cohort(num_clients, systems.num_asked(cohort_size))
    population = population._replace(sizes_descending=population.largest(places))
    inner, algorithm = algorithm, in_world(algorithm, systems, num_clients)
    if not callable(local_epochs):
        check_stragglers(stragglers, int(np.min(local_epochs)), cohort_size)
        local_epochs = epochs_by_round(local_epochs)
    source = place_data(mesh, table)
    lengths = lengths_of_loops(steps_per_loop, mesh, feed, population, local_epochs)
    functions = round_functions(
        lambda hyper: algorithm,
        feed,
        mesh,
        max_local=int(population.sizes_descending[0]),
        kind=source,
        shards=fixed,
        steps_per_loop=lengths,
    )
    return Simulation(
        algorithm=algorithm,
        batching=feed,
        mesh=mesh,
        data=source,
        population=population,
        local_epochs=local_epochs,
        cohort_size=cohort_size,
        clients_per_device=clients_per_device,
        seed=seed,
        num_partial_sums=fixed,
        programs=compile_round(functions, mesh, fixed),
        key=meshes.put_global(jax.random.key(seed), meshes.replicated(mesh)),
        stragglers=stragglers,
        hyper=(),
        systems=systems,
        sampling=sampling,
        accountant=accountant_of(algorithm, sampling, num_clients, cohort_size),
        inner_algorithm=inner,
        steps_per_loop=lengths,
    )


def lengths_of_loops(
    steps_per_loop: Count | tuple[Count, ...] | Literal["auto"],
    mesh: Mesh,
    feed: Batching,
    population: Population,
    local_epochs: Callable,
) -> tuple[int, ...]:
    """Lengths of counted loops, descending; () for none.

    On GPUs "auto" is the best for 1024 of the clients over 16 rounds.
    """
    if steps_per_loop != AUTO:
        lengths = tuple(np.ravel(steps_per_loop).tolist())
        return () if lengths == (1,) else lengths
    if mesh.devices.flat[0].platform not in meshes.GPUS:
        return ()
    ids = np.unique(np.linspace(0, population.num_clients - 1, 1024).astype(np.int64))
    per_epoch = feed.steps_per_epoch(population.sizes(ids))
    epochs = [np.asarray(local_epochs(number)) for number in range(16)]
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


def epochs_by_round(local_epochs: int | tuple[int, ...]) -> Callable:
    """Passes over a client's examples by round; a tuple's last entry stays."""
    epochs = np.atleast_1d(local_epochs).tolist()
    return lambda round: epochs[min(round, len(epochs) - 1)]


def start_simulation(sim: Simulation, variables: PyTree) -> PyTree:
    """Initial server on every client device, sharded over `model`."""
    return model_parallel.put_on_mesh(sim.mesh, sim.algorithm.init(variables))


def open_store(sim: Simulation, server: PyTree, folder=None, **resume) -> Store:
    """Open the store for this algorithm's client states; `resume` as in `Store`."""
    key = jax.random.key(sim.seed)
    template = jax.eval_shape(sim.algorithm.init_personal, key, server)
    num_clients = sim.population.num_clients
    is_shared = jax.process_count() > 1 and not resume.get("is_mirrored")
    sharer = jax.process_index() if is_shared else None
    with meshes.first_process_first("store"):
        return Store(template, num_clients, folder, sharer=sharer, **resume)


def simulate_round(
    sim: Simulation, server: PyTree, store: Store, round: int
) -> tuple[PyTree, RoundLog]:
    """Train one round: (server after it, log); client states go to the store."""
    has_world = isinstance(server, WithWorld)
    with region("sample"):
        if has_world:
            cohort, world = cohort_in_world(sim, server, round)
        else:
            cohort = cohort_of_round(sim, round)
    server, log = run_cohort(sim, server, store, cohort)
    return end_round(sim, server, log, world, round) if has_world else (server, log)


def cohort_in_world(sim: Simulation, server: WithWorld, round: int) -> tuple:
    """(cohort of a round, systems state at its end), if clients take time."""
    systems, world = sim.systems, jax.device_get(server.world)

    def steps_of(ids, round):
        return local_steps(sim, ids, round)

    if systems.asynchronous is not None:
        begin = begin_client(systems, sim.seed, sim.population.num_clients, steps_of)
        return next_buffer(systems.asynchronous, world, round, begin)
    return next_cohort(
        systems,
        world,
        round,
        cohort_size=sim.cohort_size,
        seed=sim.seed,
        population=sim.population,
        steps_of=steps_of,
    )


def end_round(
    sim: Simulation, server: WithWorld, log: RoundLog, world: PyTree, round: int
) -> tuple[WithWorld, RoundLog]:
    """Put the systems state after a round into the server, its time into the log."""
    if sim.systems.asynchronous is None:
        world = after_round(world, log.ids, log.metrics["loss"], round)
    counts = dict(log.counts)
    if sim.systems.profiles is not None:
        counts["simulated_seconds"] = float(as_seconds(world.clock))
    world = meshes.put_global(world, meshes.replicated(sim.mesh))
    return server._replace(world=world), log._replace(counts=counts)


def with_counted_work(sim: Simulation, server: PyTree) -> Simulation:
    """Count the work of clients, if their rounds take time."""
    if sim.systems.profiles is None:
        return sim
    key, inner = jax.random.key(sim.seed), sim.inner_algorithm
    row = jax.eval_shape(inner.init_personal, key, plain_server(server))
    work = count_work(sim, server, row)
    if work is None:
        raise ValueError(
            f"systems.profiles needs rounds that can be traced, got {inner}, whose "
            "`prepare` cannot be. Remove the profiles."
        )
    return sim._replace(systems=sim.systems._replace(work=work))


def cohort_of_round(sim: Simulation, round: int) -> Cohort:
    """Sample the cohort of a round, without dropped stragglers."""
    sizes = sim.population.num_clients, sim.cohort_size
    ids, is_drawn = sample_clients(sim.sampling, sim.seed, round, *sizes)
    if sim.stragglers.are_dropped:
        ids = ids[active_clients(sim.stragglers, ids, sim.seed, round)]
    cohort = with_participation(sim.systems, Cohort(ids, round), sim.seed)
    return cohort if is_drawn is None else among_drawn(cohort, is_drawn)


def among_drawn(cohort: Cohort, is_drawn: np.ndarray) -> Cohort:
    """Restrict a cohort to the entries [K] for which a client was sampled."""
    part = cohort.participation or Participation(is_drawn, is_drawn)
    part = Participation(part.is_present & is_drawn, part.is_received & is_drawn)
    return cohort._replace(participation=part)


def run_cohort(
    sim: Simulation, server: PyTree, store: Store, cohort: Cohort
) -> tuple[PyTree, RoundLog]:
    """Train a round with the given clients, each once and in any order.

    Reproducible sums and their log are in the order of the ids.
    """
    check_round(sim.accountant, cohort.round)
    sim.data.input_wait()  # forgets what was waited for before this round
    if sim.num_partial_sums is not None:
        cohort = sort_cohort(cohort)
    with compile_in_background(sim, server, store, cohort):
        work = assign(sim, server, store, cohort)
    server, rows, metrics = train_cohort(sim, server, work, cohort.round)
    min_kept = sim.algorithm.min_kept
    metrics = store_personal_state(store, work, cohort, rows, metrics, server, min_kept)
    log = RoundLog(
        ids=cohort.ids,
        metrics=metrics,
        num_added=work.added.num_added,
        schedule=work.plan,
        input_wait_seconds=sim.data.input_wait(),
    )
    return server, finish_log(sim, cohort, log)


def finish_log(sim: Simulation, cohort: Cohort, log: RoundLog) -> RoundLog:
    """Restrict a cohort's log [K] to received updates, and add epsilon."""
    log = select_received(log, cohort.participation)
    if sim.accountant is None:
        return log
    epsilon = sim.accountant.epsilon_bound(cohort.round + 1)
    return log._replace(counts={**log.counts, "epsilon": epsilon})


def sort_cohort(cohort: Cohort) -> Cohort:
    """Sort a cohort by client id."""
    order, part = np.argsort(cohort.ids, kind="stable"), cohort.participation
    if part is not None:
        part = part.take(order)
    return cohort._replace(ids=cohort.ids[order], participation=part)


def received_metrics(metrics: dict, participation: Participation | None) -> dict:
    """Metrics {name: [K]} of the clients whose update was received."""
    if participation is None:
        return metrics
    return {name: x[participation.is_received] for name, x in metrics.items()}


def select_received(log: RoundLog, participation: Participation | None) -> RoundLog:
    """Restrict a cohort's log [K] to clients whose update was received."""
    if participation is None:
        return log
    is_present, is_received = participation.is_present, participation.is_received
    counts = {
        "num_clients": int(is_received.sum()),
        "num_absent_clients": int((~is_present).sum()),
        "num_lost_updates": int((is_present & ~is_received).sum()),
    }
    return log._replace(
        ids=log.ids[is_received],
        metrics=received_metrics(log.metrics, participation),
        num_added=log.num_added[is_received],
        counts=counts,
    )


def train_cohort(
    sim: Simulation, server: PyTree, work: RoundInputs, round: int
) -> tuple[PyTree, PyTree, dict]:
    """Train: (server, client states [V', W, L, ...], metrics {name: [K]})."""
    check_memory(sim, server, work.rows)
    with region("gather"):
        loaded = load_round(sim, [work], round, key=sim.key, hyper=sim.hyper)
    with region("train"):
        server, rows, metrics = train_segments(sim, sim.programs, server, loaded)
    rows = whole_rows(rows, loaded.layouts[0], work.clients.shape[1])
    return server, rows, metrics


def assign(
    sim: Simulation, server: PyTree, store: Store, cohort: Cohort
) -> RoundInputs:
    """Prepare and schedule a cohort, and load its client states."""
    extra = empty_prepared(len(cohort.ids))
    if sim.algorithm.prepare:
        with region("prepare"):
            extra = sim.algorithm.prepare(server, sim.context(cohort))
            extra = extra._replace(num_added=meshes.fetch(extra.num_added))
    work = schedule_cohort(sim, cohort, extra)
    if jax.process_count() > 1:  # another process may have written a client's row
        store.settle()
        meshes.barrier("rows are on disk")
    clients = work.clients[work.personal]  # of this process' shards
    with region("gather"):
        rows, is_new = store.gather(clients.reshape(-1))
    column(work.slots, "is_new")[work.personal] = is_new.reshape(clients.shape)
    return work._replace(
        rows=jax.tree.map(lambda x: x.reshape(clients.shape + x.shape[1:]), rows)
    )


def schedule_cohort(sim: Simulation, cohort: Cohort, extra: Prepared) -> RoundInputs:
    """Schedule a prepared cohort, without client states."""
    ids, part = cohort.ids, cohort.participation
    steps = cohort_steps(sim, cohort, extra.num_added)
    is_received = np.full(len(ids), True) if part is None else part.is_received
    plan = build_schedule(
        steps,
        num_devices=sim.mesh.shape[meshes.CLIENTS],
        lanes=sim.clients_per_device,
        shards=sim.num_partial_sums,
        ids=ids,
    )
    inputs = SlotInputs(
        client=ids,
        cohort_index=np.arange(len(ids)),
        is_new=1,
        offset=sim.population.offsets[ids],
        num_examples=sim.population.sizes(ids),
        num_added=extra.num_added,
        num_classes=sim.population.num_classes[ids],
        num_steps=steps,
        is_random_client=is_received
        & (ids == random_client(ids[is_received], sim.seed, cohort.round)),
        is_received=None if part is None else is_received,
        staleness=0 if part is None or part.staleness is None else part.staleness,
    )
    places = plan.slots
    if part is not None:  # an absent client's slot is idle
        places = np.where(part.is_present.take(places, mode="wrap"), places, -1)
    slots = pack(inputs, places)
    clients = column(slots, "client")
    order = np.empty(len(ids) + 1, np.int32)  # the last entry is for idle slots
    order[plan.slots.reshape(-1)] = np.arange(plan.slots.size)
    return RoundInputs(
        rows=(),
        slots=slots,
        order=order[:-1],
        added=extra,
        clients=clients,
        personal=meshes.local_shards(sim.mesh, len(clients)),
        plan=plan,
    )


def cohort_steps(sim: Simulation, cohort: Cohort, num_added: np.ndarray) -> np.ndarray:
    """Local steps [K] of a cohort: fewer than `local_steps` of absent and late clients.

    Raises:
      ValueError: for steps that a number of 32 bits does not count.
    """
    steps = local_steps(sim, cohort.ids, cohort.round, num_added)
    part = cohort.participation
    if part is not None:
        steps = np.where(part.is_present, steps, 0)
        if part.max_steps is not None:
            steps = np.minimum(steps, part.max_steps)
    if (largest := steps.max(initial=0)) > MAX:
        raise ValueError(f"local steps must be below 2**31, got {largest}.")
    return steps


def local_steps(
    sim: Simulation, ids: np.ndarray, round: int, num_added: np.ndarray | int = 0
) -> np.ndarray:
    """Local steps [K] of clients `ids` [K] with `num_added` added examples."""
    epochs = np.asarray(sim.local_epochs(round))
    epochs = epochs[ids] if epochs.ndim else epochs
    epochs = client_epochs(sim.stragglers, epochs, ids, sim.seed, round)
    return sim.batching.steps_per_epoch(sim.population.sizes(ids) + num_added) * epochs


def store_personal_state(
    store: Store,
    work: RoundInputs,
    cohort: Cohort,
    rows: PyTree,
    metrics: dict,
    server: PyTree,
    min_kept: float = 0.0,
) -> dict:
    """Pass a round's client states [V', W, L, ...] to the store; return its metrics.

    Args:
      metrics: of the round's program.
      min_kept: share of the cohort whose updates must be usable.

    Raises:
      FloatingPointError: when a metric, an update or a row of a client, or the server
        after the round, is not finite; nothing is stored.
    """
    round = cohort.round
    metrics = checked_metrics(metrics, cohort, min_kept)
    check_state(server, f"round {round + 1}")
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), rows)
    ids = work.clients[work.personal].reshape(-1)  # of this process
    check_rows(rows, ids, round)
    remote_ids = np.delete(work.clients, work.personal, axis=0).reshape(-1)
    if store.is_mirrored and len(remote_ids):  # each process keeps the rows of all
        ids, rows = meshes.gather_processes((ids, rows))
        remote_ids = ()
    store.scatter(ids, rows, round, remote_ids=remote_ids)
    return metrics


def checked_metrics(metrics: dict, cohort: Cohort, min_kept: float) -> dict:
    """Check that a program's metrics {name: [K]} and its updates are finite.

    Returns:
      The metrics without `IS_FINITE`.
    """
    is_finite = metrics[IS_FINITE]
    metrics = {name: x for name, x in metrics.items() if name != IS_FINITE}
    check_metrics(metrics, cohort.ids, cohort.round)
    check_updates(is_finite, cohort.ids, cohort.round)
    part = cohort.participation
    received = cohort.ids if part is None else cohort.ids[part.is_received]
    check_dropped(received_metrics(metrics, part), received, cohort.round, min_kept)
    return metrics
