"""Plan of a federated stage, from one client's traced round.

A client's program is traced once; its FLOPs follow from its number of images and steps,
for the mean client of every round. All lanes of a device train such clients.
"""

import math
from typing import NamedTuple

import jax
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.federated import model_parallel, sums
from fedfr_jax.federated.communication import ClientTrace, trace_client
from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.federated.preparation import (
    PreparedTraffic,
    prepared_traffic,
    trace_prepare,
)
from fedfr_jax.federated.programs import on_mesh, placed
from fedfr_jax.federated.settings import build_sampling
from fedfr_jax.federated.systems.rounds import in_world
from fedfr_jax.federated.systems.state import WithWorld, plain_server
from fedfr_jax.models.flops import forward_flops, network_flops
from fedfr_jax.plan.program_cost import ProgramCost, program_cost
from fedfr_jax.plan.requirements import (
    DeviceWork,
    Requirements,
    bytes_on_device,
    count_params,
)
from fedfr_jax.types import (
    Cohort,
    Dataset,
    Experiment,
    FederatedTrainer,
    Prepared,
    PyTree,
    RoundContext,
)


class RoundShapes(NamedTuple):
    """Inputs of a round as ShapeDtypeStructs on the mesh."""

    server: PyTree
    row: PyTree  # of one client
    extra: Prepared
    table: Dataset
    prepared: ProgramCost | None  # of the algorithm's `prepare`
    traffic: PreparedTraffic  # of it


def federated_needs(
    experiment: Experiment,
    trainer: FederatedTrainer,
    start: PyTree,
    examples: Dataset,
    *,
    batch_size: int = 0,
    hard_negatives: int | None = None,
) -> Requirements:
    """Compute what the rounds of a federated stage need on each device.

    Args:
      experiment: on a mesh of as many devices as the stage will have.
      start: shapes of the variables that the stage starts from, or None.
      examples: shapes of the stored examples, [T, ...].
      batch_size: instead of the config's; 0 keeps it.
      hard_negatives: examples that the server adds to a client; None takes as many as
        the largest client has. The most that it can add is a bound of both.
    """
    federation, population = experiment.federation, experiment.task.population
    batching = experiment.batching
    batching = batching._replace(batch_size=batch_size or batching.batch_size)
    experiment = experiment._replace(batching=batching)
    systems = federation.build_systems(population.num_clients)
    algorithm = in_world(trainer.algorithm, systems, population.num_clients)
    trainer = trainer._replace(algorithm=algorithm)
    shapes = round_shapes(experiment, trainer, start, examples)
    client = client_trace(experiment, trainer, shapes)
    sizes = population.sizes(np.arange(population.num_clients))
    max_added = shapes.extra.added_rows.shape[1]
    added = int(sizes.max()) if hard_negatives is None else hard_negatives
    added = min(added, max_added)
    steps = mean_steps(experiment, trainer, sizes + added)
    cost = program_cost(client.program, loop_turns=steps)
    work = [round_work(experiment, cost)]
    if shapes.prepared:
        work.append(DeviceWork(shapes.prepared.kernels, float(federation.rounds)))
    lanes, devices = federation.clients_per_device, experiment.mesh.size
    parts = memory_parts(experiment, shapes, client)
    parts["training, all lanes"] = lanes * cost.peak
    network_shapes = jax.eval_shape(
        algorithm.personalize, trees.shapes(shapes.server), trees.shapes(shapes.row)
    )
    network = network_flops(
        trainer.count_flops, trainer.apply, network_shapes, examples.input_shape
    )
    notes = privacy_notes(experiment, trainer)
    if max_added:
        text = f"{added:,} of at most {max_added:,} hard negatives for each client"
        notes = (text, *notes)
    clients = max_cohort(experiment) / meshes.device_grid(experiment.mesh)[0]
    images = plan_cohort(experiment) * steps * batching.batch_size
    return Requirements(
        devices=devices,
        parts={name: size for name, size in parts.items() if size},
        largest_arrays=cost.largest,
        work=work,
        images=federation.rounds * images,
        forward=forward_flops(network),
        parameters=count_params(network_shapes),
        batch_size=batching.batch_size,
        clients=math.ceil(clients),
        added=added,
        lanes=lanes,
        notes=notes,
    )


def mean_steps(
    experiment: Experiment, trainer: FederatedTrainer, sizes: np.ndarray
) -> float:
    """Mean number of a client's local steps in a round of the stage.

    Args:
      sizes: [N] examples of the clients, those that the server adds included.
    """
    federation = experiment.federation
    epochs = np.ravel(federation.epochs_of(trainer))
    epochs = epochs[np.minimum(np.arange(federation.rounds), len(epochs) - 1)]
    return float(np.mean(experiment.batching.steps_per_epoch(sizes)) * epochs.mean())


def round_work(experiment: Experiment, client: ProgramCost) -> DeviceWork:
    """Work of a device in all rounds: waves of the mean client."""
    devices, shards = meshes.device_grid(experiment.mesh)
    lanes = experiment.federation.clients_per_device
    cohort = plan_cohort(experiment)
    waves = math.ceil(cohort / devices / lanes)
    busy = cohort / (waves * devices * lanes)
    kernels = [
        k._replace(flops=k.flops / shards, moved=k.moved / shards)
        for k in client.kernels
    ]
    return DeviceWork(kernels, experiment.federation.rounds * waves, lanes, busy)


def memory_parts(
    experiment: Experiment, shapes: RoundShapes, client: ClientTrace
) -> dict[str, float]:
    """Bytes on a device apart from the lanes, by purpose."""
    devices, shards = meshes.device_grid(experiment.mesh)
    cohort, server = max_cohort(experiment), shapes.server
    ring = server.versions if isinstance(server, WithWorld) else ()
    rows = math.ceil(cohort / devices) * bytes_on_device(shapes.row) / shards
    of_call = 0.0
    if (rounds := experiment.federation.rounds_per_call) > 1:  # on every device
        num_clients = experiment.task.population.num_clients
        of_call = min(rounds * cohort, num_clients) * bytes_on_device(shapes.row)
    prepared = bytes_on_device((shapes.extra.shared, shapes.extra.added_rows))
    output, kept = client.output, ()
    summary = output.update
    if client.summary is not None:
        summary, kept = sums.without_kept(client.summary)
    uploads = bytes_on_device((output.per_client, kept))
    return {
        "server, before and after the round": 2 * bytes_on_device(plain_server(server)),
        "earlier versions of the server, before and after": 2 * bytes_on_device(ring),
        "sums over clients": bytes_on_device((summary, output.sums)) / shards,
        "personal rows of the cohort": rows,
        "personal rows of a call's rounds": of_call,
        "what the server prepares": prepared,
        "uploads of the cohort": cohort * uploads,
    }


def privacy_notes(experiment: Experiment, trainer: FederatedTrainer) -> tuple[str, ...]:
    """Notes on epsilon after the last round of a private method."""
    federation, accountant = experiment.federation, trainer.accountant
    if accountant is None:
        return ()
    rounds = accountant.rounds_within_budget(federation.rounds)
    epsilon, delta = accountant.epsilon(rounds), accountant.mechanism.delta
    note = (
        f"epsilon {epsilon:.3g} at delta {delta:.2g} after {rounds} rounds, "
        f"noise multiplier {accountant.mechanism.noise_multiplier:.3g}"
    )
    if rounds == federation.rounds:
        return (note,)
    return note, f"{rounds} of {federation.rounds} rounds are within the budget"


def plan_cohort(experiment: Experiment) -> int:
    """K, the (mean) number of clients per round whose updates count."""
    federation, number = experiment.federation, experiment.task.population.num_clients
    systems = federation.build_systems(number)
    return systems.num_counted(federation.cohort_size or number)


def max_cohort(experiment: Experiment) -> int:
    """Largest number of clients in a round, with over-selection or Poisson capacity."""
    federation, number = experiment.federation, experiment.task.population.num_clients
    num_asked = federation.build_systems(number).num_asked(plan_cohort(experiment))
    return build_sampling(federation.sampling).max_cohort(number, num_asked)


def round_shapes(
    experiment: Experiment,
    trainer: FederatedTrainer,
    start: PyTree,
    examples: Dataset,
) -> RoundShapes:
    """Shapes of the arguments of round 0."""
    mesh, algorithm = experiment.mesh, trainer.algorithm
    key = jax.random.key(0)
    server = jax.eval_shape(lambda x: algorithm.init(trainer.init_variables(x)), start)
    row = jax.eval_shape(algorithm.init_personal, key, server)
    table = on_mesh(mesh, examples)
    server = placed(server, model_parallel.placement(mesh, server))
    cohort = max_cohort(experiment)
    context = RoundContext(
        dataset=table,
        population=experiment.task.population,
        cohort=Cohort(np.arange(cohort), 0),
        batching=experiment.batching,
        mesh=mesh,
    )
    extra, prepared = empty_prepared(cohort), None
    if algorithm.prepare:
        extra, program, _ = trace_prepare(algorithm.prepare, server, context)
        prepared = program_cost(program.jaxpr, num_devices=meshes.device_grid(mesh)[0])
    return RoundShapes(
        server=server,
        row=row,
        extra=on_mesh(mesh, extra),
        table=table,
        prepared=prepared,
        traffic=prepared_traffic(algorithm, server, context),
    )


def client_trace(
    experiment: Experiment, trainer: FederatedTrainer, shapes: RoundShapes
) -> ClientTrace:
    """Trace a client's round on the shapes of `round_shapes`."""
    largest = int(experiment.task.population.largest(1)[0])
    inputs = trees.shapes((shapes.server, shapes.row, shapes.extra, shapes.table))
    return trace_client(
        trainer.algorithm, experiment.batching, largest, *inputs, shapes.traffic
    )
