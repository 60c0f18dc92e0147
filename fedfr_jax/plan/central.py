"""Plan of a central stage, from its traced step."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.central.batches import Chunk, EpochOrder, build_batch
from fedfr_jax.central.class_parallel import CLASS_TABLE, rows_per_device
from fedfr_jax.central.epochs import state_shapes
from fedfr_jax.central.settings import build_mesh, build_optimizer, build_step_sharding
from fedfr_jax.central.sharding import (
    LeafSharding,
    leaf_sharding,
    shardings,
    state_layout,
)
from fedfr_jax.central.step import State, build_step
from fedfr_jax.models.flops import forward_flops, network_flops
from fedfr_jax.plan.program_cost import program_cost
from fedfr_jax.plan.requirements import (
    DeviceWork,
    Requirements,
    bytes_on_device,
    on_device,
)
from fedfr_jax.types import CentralTrainer, Dataset, PyTree


class Step(NamedTuple):
    """A training step with its arguments as shapes, to be traced or compiled."""

    run: Callable  # (number, State, Piece) -> (State, metrics)
    arguments: tuple
    mesh: Mesh
    layout: LeafSharding

    @property
    def state(self) -> State:
        """State that the step updates."""
        return self.arguments[1]


def central_needs(
    trainer: CentralTrainer,
    mesh: Mesh,
    examples: Dataset,
    *,
    batch_size: int = 0,
    num_classes: int = 0,
) -> Requirements:
    """Compute what a central stage needs on each device.

    Args:
      mesh: of as many devices as the stage will have.
      examples: shapes of the stored examples, [T, ...].
      batch_size, num_classes: instead of the config's; 0 keeps them.
    """
    step = central_step(
        trainer, mesh, examples, batch_size=batch_size, num_classes=num_classes
    )
    leaves = jax.tree.leaves(step.arguments)
    devices = meshes.device_grid(step.mesh)[0]
    cost = program_cost(
        jax.make_jaxpr(step.run)(*step.arguments),
        sizes={i: on_device(x) for i, x in enumerate(leaves)},
        num_devices=devices,
    )
    parts, grads = memory_parts(trainer, step)
    parts["activations and other temporaries"] = max(cost.peak - grads, 0.0)
    batch = step.arguments[2].rows.shape[0]
    steps = trainer.settings.epochs * (trainer.num_rows // batch)
    variables = step.state.variables
    network_shapes = jax.eval_shape(trainer.global_model, variables)
    network = network_flops(
        trainer.count_flops, trainer.apply_global, network_shapes, examples.input_shape
    )
    rows = trees.count(variables["params"]) - trees.count(network_shapes["params"])
    if trainer.sharded_classes:  # of those that are sampled
        rows = round(rows * max(trainer.settings.class_rates))
    return Requirements(
        devices=devices,
        parts=parts,
        largest_arrays=cost.largest,
        work=[DeviceWork(cost.kernels, steps)],
        images=steps * batch,
        forward=forward_flops(network, rows),
        parameters=trees.count(variables["params"]),
        batch_size=batch,
        classes=num_classes or count_classes(trainer, variables["params"]),
    )


def central_step(
    trainer: CentralTrainer,
    mesh: Mesh,
    examples: Dataset,
    *,
    batch_size: int = 0,
    num_classes: int = 0,
) -> Step:
    """Build the step of a central stage; arguments as in `central_needs`."""
    batch_size = batch_size or trainer.settings.batch_size
    settings = trainer.settings._replace(batch_size=batch_size)
    stage_mesh = build_mesh(settings, mesh)
    variables = jax.eval_shape(trainer.init, jax.random.key(0))
    variables, number = with_classes(trainer, variables, stage_mesh, num_classes)
    pattern = f"^{trainer.sharded_classes.path}$" if trainer.sharded_classes else None
    sharding = build_step_sharding(settings, number, pattern)
    sharding = sharding._replace(class_rate=max(settings.class_rates))
    optimizer = build_optimizer(settings, trainer.num_rows)
    layout = leaf_sharding(sharding.rules, variables["params"], stage_mesh)
    order = EpochOrder(
        first_row=trainer.first_row,
        num_rows=trainer.num_rows,
        batch_size=batch_size,
        num_devices=meshes.device_grid(stage_mesh)[0],
        seed=0,
    )
    batching = trainer.batching._replace(batch_size=batch_size)
    batch = build_batch(batching, order, stage_mesh, trainer.annotate_batch)
    step = build_step(trainer.loss, optimizer, stage_mesh, sharding)

    def run(number, state, piece):
        key = jax.random.fold_in(jax.random.key(0), number)
        return step(state, batch(piece, key, number), key)

    state = state_shapes(variables, optimizer, stage_mesh, sharding)
    arguments = first_chunk(stage_mesh, examples, batch_size, state)
    return Step(run, arguments, stage_mesh, layout)


def with_classes(
    trainer: CentralTrainer, variables: PyTree, mesh: Mesh, number: int
) -> tuple[PyTree, int]:
    """Resize the class matrix to `number` classes (0 keeps it): (variables, number)."""
    params, table = variables["params"], trainer.sharded_classes
    number = number or count_classes(trainer, params)
    if CLASS_TABLE not in params:
        return variables, number
    count = number
    if table:
        devices = meshes.device_grid(mesh)[0]
        rows_each = rows_per_device(number, devices, trainer.settings.class_chunk_size)
        count = devices * rows_each
    rows = params[CLASS_TABLE]
    rows = jax.ShapeDtypeStruct((count, *rows.shape[1:]), rows.dtype)
    return {**variables, "params": {**params, CLASS_TABLE: rows}}, number


def count_classes(trainer: CentralTrainer, params: PyTree) -> int:
    """Number of class vectors; 0 if the network itself ends in classes."""
    if trainer.sharded_classes:
        return len(trainer.sharded_classes.names)
    return params[CLASS_TABLE].shape[0] if CLASS_TABLE in params else 0


def first_chunk(mesh: Mesh, examples: Dataset, batch_size: int, state: State) -> tuple:
    """(step number, state, examples of a step) as ShapeDtypeStructs."""
    sharded, replicated = meshes.over_clients(mesh), meshes.replicated(mesh)

    def batch_of(x):
        shape = (batch_size, *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharded)

    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    rows = jax.ShapeDtypeStruct((batch_size,), jnp.int32, sharding=sharded)
    return number, state, Chunk(rows, jax.tree.map(batch_of, examples), number, number)


def memory_parts(trainer: CentralTrainer, step: Step) -> tuple[dict[str, float], float]:
    """(bytes of the state on a device by purpose, bytes of all gradients)."""
    variables, opt_state = step.state
    params = variables["params"]
    is_table = {
        k: jax.tree.map(lambda _, k=k: k == CLASS_TABLE, v) for k, v in params.items()
    }
    optimizer = build_optimizer(trainer.settings, trainer.num_rows)
    is_moment_of_table = state_layout(optimizer, opt_state, is_table, False)
    grads = meshes.shapes_at(params, shardings(step.mesh, step.layout.grads))
    weights, class_weights = _split(params, is_table)
    moments, class_moments = _split(opt_state, is_moment_of_table)
    gradients, class_gradients = _split(grads, is_table)
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


def _split(tree, is_table) -> tuple[float, float]:
    """Bytes on a device of (all other leaves, the class matrices)."""
    sizes = [0.0, 0.0]
    for x, is_one in zip(jax.tree.leaves(tree), jax.tree.leaves(is_table), strict=True):
        sizes[is_one] += on_device(x)
    return sizes[0], sizes[1]
