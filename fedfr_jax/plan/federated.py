"""Plan of a federated stage, from one client's traced round.

A client's program is traced once; its FLOPs follow from its number of images and steps,
for the mean client of every round. All lanes of a device train such clients.
"""

import math

import jax
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.federated import sums
from fedfr_jax.federated.systems.state import WithSystems, plain_server
from fedfr_jax.models.flops import forward_flops, network_flops
from fedfr_jax.plan.devices import DeviceWork, Requirements
from fedfr_jax.plan.program_cost import ProgramCost, bytes_on_device, program_cost
from fedfr_jax.plan.shapes import (
    StageShapes,
    example_shapes,
    federated_trainer,
    stage_shapes,
)
from fedfr_jax.types import Experiment, FederatedTrainer, PyTree


def federated_needs(
    experiment: Experiment,
    name: str,
    *,
    batch_size: int = 0,
    hard_negatives: int | None = None,
) -> Requirements:
    """Compute what the rounds of a federated stage need on each device.

    Args:
      experiment: on a mesh of as many devices as the stage will have.
      name: of the stage.
      batch_size: instead of the config's; 0 keeps it.
      hard_negatives: examples that the server adds to a client; None takes as many as
        the largest client has. The most that it can add is a bound of both.
    """
    batching = experiment.batching
    batching = batching._replace(batch_size=batch_size or batching.batch_size)
    experiment = experiment._replace(batching=batching)
    trainer = federated_trainer(experiment, name)
    shapes = stage_shapes(experiment, name)
    sim, federation = shapes.sim, experiment.federation
    devices, _ = meshes.device_grid(sim.mesh)
    sizes = sim.population.sizes(np.arange(sim.population.num_clients))
    max_added = shapes.extra.added_rows.shape[1]
    added = int(sizes.max()) if hard_negatives is None else hard_negatives
    added = min(added, max_added)
    steps = mean_steps(experiment, trainer, sizes + added)
    cost = program_cost(shapes.client.program, loop_turns=steps)
    work = [round_work(shapes, cost, federation.rounds)]
    if shapes.client.prepare:
        prepared = program_cost(shapes.client.prepare, num_devices=devices)
        work.append(DeviceWork(prepared.kernels, float(federation.rounds)))
    parts = memory_parts(shapes, federation.rounds_per_call)
    parts["training, all lanes"] = sim.settings.clients_per_device * cost.peak
    network_shapes = jax.eval_shape(
        sim.algorithm.personalize, *trees.shapes((shapes.server, shapes.row))
    )
    input_shape = example_shapes(experiment).input_shape
    network = network_flops(
        trainer.count_flops, trainer.apply, network_shapes, input_shape
    )
    notes = privacy_notes(experiment, trainer)
    if max_added:
        text = f"{added:,} of at most {max_added:,} hard negatives for each client"
        notes = (text, *notes)
    return Requirements(
        devices=sim.mesh.size,
        parts={name: size for name, size in parts.items() if size},
        work=work,
        images=federation.rounds
        * sim.settings.cohort_size
        * steps
        * batching.batch_size,
        forward=forward_flops(network),
        parameters=count_params(network_shapes),
        batch_size=batching.batch_size,
        clients=math.ceil(sim.num_places / devices),
        added=added,
        lanes=sim.settings.clients_per_device,
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


def round_work(shapes: StageShapes, client: ProgramCost, rounds: int) -> DeviceWork:
    """Work of a device in all rounds: waves of the mean client."""
    sim = shapes.sim
    devices, shards = meshes.device_grid(sim.mesh)
    lanes = sim.settings.clients_per_device
    waves = math.ceil(sim.settings.cohort_size / devices / lanes)
    busy = sim.settings.cohort_size / (waves * devices * lanes)
    kernels = [
        k._replace(flops=k.flops / shards, moved=k.moved / shards)
        for k in client.kernels
    ]
    return DeviceWork(kernels, float(rounds * waves), lanes, busy)


def memory_parts(shapes: StageShapes, rounds_per_call: int) -> dict[str, float]:
    """Bytes on a device apart from the lanes, by purpose."""
    sim, server = shapes.sim, shapes.server
    devices, shards = meshes.device_grid(sim.mesh)
    cohort, row = sim.num_places, bytes_on_device(shapes.row)
    ring = server.versions if isinstance(server, WithSystems) else ()
    of_call = 0.0
    if rounds_per_call > 1:  # on every device
        of_call = min(rounds_per_call * cohort, sim.population.num_clients) * row
    prepared = bytes_on_device((shapes.extra.shared, shapes.extra.added_rows))
    output, kept = shapes.client.output, ()
    summary = output.update
    if shapes.client.summary is not None:
        summary, kept = sums.without_kept(shapes.client.summary)
    uploads = bytes_on_device((output.per_client, kept))
    return {
        "server, before and after the round": 2 * bytes_on_device(plain_server(server)),
        "earlier versions of the server, before and after": 2 * bytes_on_device(ring),
        "sums over clients": bytes_on_device((summary, output.sums)) / shards,
        "personal rows of the cohort": math.ceil(cohort / devices) * row / shards,
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


def count_params(variables: PyTree) -> int:
    """Number of parameters of a network, without running statistics."""
    leaves = trees.by_name(variables).items()
    return trees.count(
        [x for name, x in leaves if "batch_stats" not in name.split("/")]
    )
