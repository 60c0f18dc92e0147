"""Plan of a federated stage, from one client's traced round.

A client's program is traced once; its FLOPs follow from its number of images and steps,
for the mean client of every round. All lanes of a device train such clients.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated import model_parallel
from fedfr_jax.federated.client import (
    SlotInputs,
    all_rows,
    client_key,
    client_view,
    num_columns,
)
from fedfr_jax.federated.engine import empty_prepared, train_client
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
from fedfr_jax.plan.program_cost import Kernel, ProgramCost, program_cost
from fedfr_jax.plan.requirements import (
    DeviceWork,
    Requirements,
    bytes_on_device,
    count_params,
)
from fedfr_jax.types import (
    Algorithm,
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
    key: jax.ShapeDtypeStruct
    prepared: ProgramCost | None  # of the algorithm's `prepare`
    traffic: PreparedTraffic  # of it


def federated_needs(
    experiment: Experiment,
    trainer: FederatedTrainer,
    start: PyTree,
    examples: Dataset,
    *,
    batch_size: int = 0,
    lanes: int = 0,
    hard_negatives: int | None = None,
) -> Requirements:
    """Compute what the rounds of a federated stage need on each device.

    Args:
      experiment: on a mesh of as many devices as the stage will have.
      start: shapes of the variables that the stage starts from, or None.
      examples: shapes of the stored examples, [T, ...].
      batch_size, lanes: instead of the config's; 0 keeps them.
      hard_negatives: examples that the server adds to a client; None takes as many as
        the largest client has. The most that it can add is a bound of both.
    """
    federation, batching = experiment.federation, experiment.batching
    devices, _ = meshes.device_grid(experiment.mesh)
    num_clients = experiment.task.population.num_clients
    systems = federation.build_systems(num_clients)
    algorithm = in_world(trainer.algorithm, systems, num_clients)
    trainer = trainer._replace(algorithm=algorithm)
    batching = batching._replace(batch_size=batch_size or batching.batch_size)
    lanes = lanes or federation.clients_per_device
    shapes = round_shapes(experiment, trainer, batching, start, examples)
    population = experiment.task.population
    sizes = population.sizes(np.arange(population.num_clients))
    largest = int(sizes.max())
    program, output = client_program(trainer.algorithm, batching, largest, shapes)
    max_added = shapes.extra.added_rows.shape[1]
    added = min(largest if hard_negatives is None else hard_negatives, max_added)
    work, images, client = count_rounds(
        experiment, trainer, program, batching, sizes, added, lanes
    )
    if shapes.prepared:
        work.append(DeviceWork(shapes.prepared.kernels, float(federation.rounds)))
    parts = memory_parts(experiment, shapes, *output)
    parts["training, all lanes"] = lanes * client.peak
    network_shapes = jax.eval_shape(
        trainer.algorithm.personalize,
        trees.shapes(shapes.server),
        trees.shapes(shapes.row),
    )
    network = network_flops(
        trainer.count_flops, trainer.apply, network_shapes, examples.input_shape
    )
    return Requirements(
        devices=experiment.mesh.size,
        parts={name: size for name, size in parts.items() if size},
        largest_arrays=client.largest,
        work=work,
        images=images,
        forward=forward_flops(network),
        parameters=count_params(network_shapes),
        batch_size=batching.batch_size,
        clients=math.ceil(max_cohort(experiment) / devices),
        added=added,
        lanes=lanes,
        notes=plan_notes(client, added, max_added) + privacy_notes(experiment, trainer),
    )


def count_rounds(
    experiment: Experiment,
    trainer: FederatedTrainer,
    program: ClosedJaxpr,
    batching: Batching,
    sizes: np.ndarray,
    added: int,
    lanes: int,
) -> tuple[list[DeviceWork], float, ProgramCost]:
    """Count the work of all rounds, their images, and a client of the last round.

    Args:
      program: of `client_program`.
      sizes: [N] examples of the clients, without those that the server adds.
    """
    federation = experiment.federation
    devices, shards = meshes.device_grid(experiment.mesh)
    cohort = plan_cohort(experiment)
    waves = math.ceil(cohort / devices / lanes)
    busy = cohort / (waves * devices * lanes)
    epochs = np.ravel(federation.epochs_of(trainer))
    times_of = np.bincount(np.minimum(np.arange(federation.rounds), len(epochs) - 1))
    per_epoch = float(np.mean(batching.steps_per_epoch(sizes + added)))
    work, images, client = [], 0.0, None
    for passes, times in zip(epochs[: len(times_of)].tolist(), times_of, strict=True):
        steps = per_epoch * passes
        values = argument_values(sizes.mean(), added, steps)
        client = program_cost(program, known=values)
        kernels = shard_kernels(client.kernels, shards)
        work.append(DeviceWork(kernels, float(times * waves), lanes, busy))
        images += float(times) * cohort * steps * batching.batch_size
    return work, images, client


def shard_kernels(kernels: Sequence[Kernel], shards: int) -> list[Kernel]:
    """A client's kernels on one of the devices that share its batches."""
    return [k._replace(flops=k.flops / shards, moved=k.moved / shards) for k in kernels]


def memory_parts(
    experiment: Experiment, shapes: RoundShapes, summary: PyTree, lane_output: PyTree
) -> dict[str, float]:
    """Bytes on a device apart from the lanes, by purpose.

    Args:
      summary, lane_output: results of a client, as shapes.
    """
    devices, shards = meshes.device_grid(experiment.mesh)
    cohort, server = max_cohort(experiment), shapes.server
    ring = server.versions if isinstance(server, WithWorld) else ()
    rows = math.ceil(cohort / devices) * bytes_on_device(shapes.row) / shards
    of_call = 0.0
    if (rounds := experiment.federation.rounds_per_call) > 1:  # on every device
        num_clients = experiment.task.population.num_clients
        of_call = min(rounds * cohort, num_clients) * bytes_on_device(shapes.row)
    prepared = bytes_on_device((shapes.extra.shared, shapes.extra.added_rows))
    uploads = bytes_on_device((lane_output.per_client, lane_output.kept))
    return {
        "server, before and after the round": 2 * bytes_on_device(plain_server(server)),
        "earlier versions of the server, before and after": 2 * bytes_on_device(ring),
        "sums over clients": bytes_on_device(summary) / shards,
        "personal rows of the cohort": rows,
        "personal rows of a call's rounds": of_call,
        "what the server prepares": prepared,
        "uploads of the cohort": cohort * uploads,
    }


def plan_notes(client: ProgramCost, added: int, max_added: int) -> tuple[str, ...]:
    """Notes on the accuracy of the numbers."""
    notes = []
    if not client.is_whole:
        notes.append("loops whose length depends on values are counted once")
    if max_added:
        text = f"{added:,} of at most {max_added:,} hard negatives for each client"
        notes.append(text)
    return tuple(notes)


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
    batching: Batching,
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
        batching=batching,
        mesh=mesh,
    )
    extra, prepared = empty_prepared(cohort), None
    if algorithm.prepare:
        extra, program, _ = trace_prepare(algorithm.prepare, server, context)
        prepared = program_cost(program, num_devices=meshes.device_grid(mesh)[0])
    return RoundShapes(
        server=server,
        row=row,
        extra=on_mesh(mesh, extra),
        table=table,
        key=on_mesh(mesh, jax.eval_shape(jax.random.key, 0)),
        prepared=prepared,
        traffic=prepared_traffic(algorithm, server, context),
    )


def client_program(
    algorithm: Algorithm, batching: Batching, max_local: int, shapes: RoundShapes
):
    """Trace a client's round: (program, (summary, LaneOutput) as shapes).

    The first arguments of the program are the fields of the client's `SlotInputs`.
    """
    number = jax.ShapeDtypeStruct((), jnp.int32)
    slot = SlotInputs(*[number] * num_columns(False))
    slot = slot._replace(is_new=jax.ShapeDtypeStruct((), jnp.bool_))

    def train(slot, server, row, extra, table, round, key):
        def view(key):
            return client_view(
                batching, max_local, key, slot, extra, all_rows(table), round
            )

        key = client_key(key, slot.client)
        return train_client(algorithm, key, server, row, slot, view, round)

    arguments = trees.shapes((shapes.server, shapes.row, shapes.extra, shapes.table))
    return jax.make_jaxpr(train, return_shape=True)(
        slot, *arguments, number, trees.shapes(shapes.key)
    )


def argument_values(num_examples: float, added: int, steps: float) -> dict[int, Any]:
    """Values of a client's `SlotInputs`, {argument number: value}."""
    zero = np.int32(0)
    values = {"client": zero, "cohort_index": zero, "offset": zero, "start": zero}
    values["is_new"] = np.bool_(False)
    values["num_examples"] = np.int32(round(num_examples))
    values["num_added"] = np.int32(added)
    values["num_steps"] = np.int32(round(steps))
    numbers = {name: i for i, name in enumerate(SlotInputs._fields)}
    return {numbers[name]: value for name, value in values.items() if name in numbers}
