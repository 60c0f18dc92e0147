"""What stages need of a device: memory by use, and kernels, from traced programs.

Of a central stage one step is traced. Of a federated one a client's program is traced
once; its FLOPs follow from its number of images and steps, for the mean client of every
round. All lanes of a device train such clients.
"""

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.central.class_parallel import CLASS_TABLE, rows_per_device
from fedfr_jax.central.epochs import build_epochs
from fedfr_jax.central.settings import build_mesh, build_step_sharding
from fedfr_jax.central.sharding import leaf_sharding, shardings
from fedfr_jax.central.step import State
from fedfr_jax.federated import sums
from fedfr_jax.federated.disclosure import work_of
from fedfr_jax.federated.schedule import choose_lanes, num_waves
from fedfr_jax.federated.systems.footprint import costs_of
from fedfr_jax.federated.systems.state import WithSystems, plain_server
from fedfr_jax.models.flops import PASSES, forward_flops, network_flops
from fedfr_jax.models.frozen import whole_variables
from fedfr_jax.plan.devices import Device, seconds
from fedfr_jax.plan.program_cost import (
    Kernel,
    ProgramCost,
    bytes_on_device,
    on_device,
    plain,
    program_cost,
    tiled,
)
from fedfr_jax.runs.shapes import (
    StageShapes,
    example_shapes,
    federated_trainer,
    stage_shapes,
)
from fedfr_jax.types import (
    CentralTrainer,
    Dataset,
    Experiment,
    FederatedTrainer,
    PyTree,
)


class DeviceWork(NamedTuple):
    """Kernels of a device, and how often it runs them."""

    kernels: list[Kernel]
    times: float
    lanes: int = 1
    busy: float = 1.0  # share of all devices' lanes that have a client
    # Number of lanes -> waves of a round, of clients that train
    waves_of: Callable[[int], int] | None = None


class Requirements(NamedTuple):
    """Requirements of a stage on each of `devices` devices."""

    devices: int
    parts: Mapping[str, float]  # bytes by use, without the examples
    work: list[DeviceWork]  # of the whole stage
    images: float  # trained in the whole stage, by all devices
    forward: float  # FLOPs of the network and its classes on an image
    parameters: int
    batch_size: int  # of a step: of all devices in a central stage, else of a client
    classes: int = 0  # with rows on the devices, in a central stage
    clients: int = 0  # of a round on a device
    added: int = 0  # examples that the server adds to a client's
    lanes: int = 0  # clients at once on a device, in a federated stage
    notes: tuple[str, ...] = ()
    spent: Mapping[str, float] = MappingProxyType({})  # by clients, in all rounds

    @property
    def memory(self) -> float:
        """Bytes on a device, without the examples."""
        return sum(self.parts.values())

    @property
    def flops(self) -> float:
        """FLOPs per image of everything that the stage computes."""
        total = 0.0
        for work in self.work:
            flops = sum(x.times * x.flops for x in work.kernels)
            total += work.times * work.lanes * work.busy * flops
        return total * self.devices / max(self.images, 1)

    def seconds(self, device: Device) -> float:
        """Expected seconds of the whole stage."""
        return sum(w.times * seconds(w.kernels, device, w.lanes) for w in self.work)

    def fastest_lanes(self, device: Device, most: int) -> int:
        """Lanes in [1, most] with which a federated stage's rounds are shortest."""
        kernels, waves_of = self.work[0].kernels, self.work[0].waves_of
        assert waves_of is not None
        return choose_lanes(lambda n: seconds(kernels, device, n), waves_of, most)

    def utilization(self, device: Device) -> float:
        """Model FLOPs utilization, relative to the devices' bfloat16 peak."""
        model_flops = PASSES * self.forward * self.images
        return model_flops / (self.seconds(device) * self.devices * device.bfloat16)


def needs_function(
    experiment: Experiment,
    name: str,
    hard_negatives: int | None = None,
    has_tiles: bool = False,
) -> Callable[..., Requirements]:
    """Build (**changed numbers) -> `Requirements` of a stage.

    Args:
      has_tiles: whether the devices are TPUs.
    """
    trainer = experiment.stages[name].trainer
    tiles = {"has_tiles": has_tiles}
    if isinstance(trainer, CentralTrainer):
        arguments = trainer, experiment.mesh, example_shapes(experiment)
        return functools.partial(central_needs, *arguments, **tiles)
    return functools.partial(
        federated_needs, experiment, name, hard_negatives=hard_negatives, **tiles
    )


def central_needs(
    trainer: CentralTrainer,
    mesh: Mesh,
    examples: Dataset,
    *,
    batch_size: int = 0,
    num_classes: int = 0,
    has_tiles: bool = False,
) -> Requirements:
    """Compute what a central stage needs on each device.

    Args:
      mesh: of as many devices as the stage will have.
      examples: shapes of the stored examples, [T, ...].
      batch_size, num_classes: instead of the config's; 0 keeps them.
    """
    batch_size = batch_size or trainer.settings.batch_size
    settings = trainer.settings._replace(batch_size=batch_size)
    batching = trainer.batching._replace(batch_size=batch_size)
    trainer = trainer._replace(settings=settings, batching=batching)
    mesh = build_mesh(settings, mesh)
    devices = meshes.device_grid(mesh)[0]
    trainer, variables = with_classes(trainer, devices, num_classes)
    num_rows = max(trainer.num_rows, batch_size)  # of a batch that is to be tried
    epochs = build_epochs(trainer._replace(num_rows=num_rows), mesh, 0)
    arguments = (*epochs.shapes(variables, examples), np.int32(0))
    state, chunk, _ = arguments
    leaves = jax.tree.leaves((state, chunk))
    cost = program_cost(
        jax.make_jaxpr(epochs.step)(*arguments).jaxpr,
        sizes={i: on_device(x) for i, x in enumerate(leaves) if hasattr(x, "sharding")},
        num_devices=devices,
        padding=tiled(1) if has_tiles else plain,
    )
    parts, grads = _central_parts(trainer, mesh, state)
    parts["activations and other temporaries"] = max(cost.peak - grads, 0.0)
    steps = settings.epochs * (trainer.num_rows // batch_size)
    network_shapes = jax.eval_shape(trainer.global_model, state.variables)
    network = network_flops(
        trainer.count_flops, trainer.apply_global, network_shapes, examples.input_shape
    )
    rows = trees.count(variables["params"]) - trees.count(network_shapes["params"])
    if trainer.sharded_classes:  # of those that are sampled
        rows = round(rows * max(settings.class_rates))
    return Requirements(
        devices=devices,
        parts=parts,
        work=[DeviceWork(cost.kernels, steps)],
        images=steps * batch_size,
        forward=forward_flops(network, rows),
        parameters=trees.count(variables["params"]),
        batch_size=batch_size,
        classes=num_classes or count_classes(trainer, variables["params"]),
    )


def with_classes(
    trainer: CentralTrainer, devices: int, number: int
) -> tuple[CentralTrainer, PyTree]:
    """A trainer of `number` classes (0 keeps them), and its variables as shapes."""
    variables = jax.eval_shape(trainer.init, jax.random.key(0))
    params, classes = variables["params"], trainer.sharded_classes
    if CLASS_TABLE not in params:
        return trainer, variables
    count = number = number or count_classes(trainer, params)
    if classes:
        trainer = trainer._replace(
            sharded_classes=classes._replace(names=("",) * number)
        )
        chunk_size = trainer.settings.class_chunk_size
        count = devices * rows_per_device(number, devices, chunk_size)
    rows = params[CLASS_TABLE]
    rows = jax.ShapeDtypeStruct((count, *rows.shape[1:]), rows.dtype)
    return trainer, {**variables, "params": {**params, CLASS_TABLE: rows}}


def count_classes(trainer: CentralTrainer, params: PyTree) -> int:
    """Number of class vectors; 0 if the network itself ends in classes."""
    if trainer.sharded_classes:
        return len(trainer.sharded_classes.names)
    return params[CLASS_TABLE].shape[0] if CLASS_TABLE in params else 0


def _central_parts(
    trainer: CentralTrainer, mesh: Mesh, state: State
) -> tuple[dict[str, float], float]:
    """(bytes of the state on a device by purpose, bytes of all gradients)."""
    variables, opt_state = state
    params = variables["params"]
    sharding = build_step_sharding(trainer.settings, trainer.sharded_classes)
    layout = leaf_sharding(sharding, params, mesh).grads
    weights, class_weights = _split(params)
    moments, class_moments = _split(opt_state)
    grads = meshes.shapes_at(params, shardings(mesh, layout))
    gradients, class_gradients = _split(grads)
    if trainer.sharded_classes:  # of the rows that are sampled
        class_gradients *= max(trainer.settings.class_rates)
    class_bytes = class_weights + class_moments + class_gradients
    parts = {
        "parameters": weights,
        "optimizer": moments,
        "gradients": gradients,
        "rows of classes, with momentum and gradient": class_bytes,
        "batch statistics": bytes_on_device(variables["batch_stats"]),
    }
    return parts, gradients + class_gradients


def _split(tree: PyTree) -> tuple[float, float]:
    """Bytes on a device of (all other leaves, the class matrices)."""
    sizes = [0.0, 0.0]
    for name, x in trees.by_name(tree).items():
        sizes[CLASS_TABLE in name.split("/")] += on_device(x)
    return sizes[0], sizes[1]


def federated_needs(
    experiment: Experiment,
    name: str,
    *,
    batch_size: int = 0,
    hard_negatives: int | None = None,
    has_tiles: bool = False,
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
    padding = tiled(sim.settings.clients_per_device) if has_tiles else plain
    cost = program_cost(shapes.client.program, loop_turns=steps, padding=padding)
    work = [round_work(shapes, cost, federation.rounds)]
    if shapes.client.prepare:
        prepared = program_cost(shapes.client.prepare, num_devices=devices)
        work.append(DeviceWork(prepared.kernels, float(federation.rounds)))
    parts = _round_parts(shapes, federation.rounds_per_call)
    frozen = trainer.frozen_model.frozen.shapes if trainer.frozen_model else ()
    parts["frozen leaves"] = bytes_on_device(frozen)
    peak = max(cost.peak - parts["frozen leaves"], 0.0)  # lanes share them
    parts["training, all lanes"] = sim.settings.clients_per_device * peak

    def network_of(server, row):
        variables, model = sim.algorithm.personalize(server, row), trainer.frozen_model
        return whole_variables(model, variables) if model else variables

    states = trees.shapes((shapes.server, shapes.row))
    network_shapes = jax.eval_shape(network_of, *states)
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
        spent=expected_costs(shapes, steps, federation.rounds),
    )


def expected_costs(
    shapes: StageShapes, steps: float, rounds: int
) -> Mapping[str, float]:
    """Energy, CO2 and price of all rounds, of mean clients; {} if none is counted."""
    sim = shapes.sim
    if (prices := sim.settings.systems.footprint) is None:
        return {}
    ids, work = np.arange(sim.population.num_clients), work_of(shapes.client)
    costs = costs_of(prices, work, ids, np.full(len(ids), steps), None).total
    share = rounds * sim.settings.cohort_size / len(ids)
    return {name: share * cost for name, cost in costs.items()}


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
    cohort, partial_sums = sim.settings.cohort_size, sim.settings.partial_sums
    waves_of = lambda n: num_waves(cohort, n, devices, partial_sums)
    waves = waves_of(lanes)
    busy = cohort / (waves * devices * lanes)
    kernels = [
        k._replace(flops=k.flops / shards, moved=k.moved / shards)
        for k in client.kernels
    ]
    return DeviceWork(kernels, float(rounds * waves), lanes, busy, waves_of)


def _round_parts(shapes: StageShapes, rounds_per_call: int) -> dict[str, float]:
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
