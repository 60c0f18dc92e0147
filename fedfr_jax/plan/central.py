"""Plan of a central stage, from its traced step."""

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.central.class_parallel import CLASS_TABLE, rows_per_device
from fedfr_jax.central.settings import build_mesh, build_optimizer, build_step_sharding
from fedfr_jax.central.sharding import leaf_sharding, shardings, state_layout
from fedfr_jax.central.step import State
from fedfr_jax.models.flops import forward_flops, network_flops
from fedfr_jax.plan.devices import DeviceWork, Requirements
from fedfr_jax.plan.program_cost import bytes_on_device, on_device, program_cost
from fedfr_jax.runs.central_stage import build_epochs_of_stage
from fedfr_jax.types import CentralTrainer, Dataset, PyTree


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
    batch_size = batch_size or trainer.settings.batch_size
    settings = trainer.settings._replace(batch_size=batch_size)
    batching = trainer.batching._replace(batch_size=batch_size)
    trainer = trainer._replace(settings=settings, batching=batching)
    mesh = build_mesh(settings, mesh)
    devices = meshes.device_grid(mesh)[0]
    trainer, variables = with_classes(trainer, devices, num_classes)
    num_rows = max(trainer.num_rows, batch_size)  # of a batch that is to be tried
    epochs = build_epochs_of_stage(trainer._replace(num_rows=num_rows), mesh, 0)
    arguments = (*epochs.shapes(variables, examples), np.int32(0))
    state, chunk, _ = arguments
    leaves = jax.tree.leaves((state, chunk))
    cost = program_cost(
        jax.make_jaxpr(epochs.step)(*arguments).jaxpr,
        sizes={i: on_device(x) for i, x in enumerate(leaves) if hasattr(x, "sharding")},
        num_devices=devices,
    )
    parts, grads = memory_parts(trainer, mesh, state)
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
    params, table = variables["params"], trainer.sharded_classes
    if CLASS_TABLE not in params:
        return trainer, variables
    count = number = number or count_classes(trainer, params)
    if table:
        trainer = trainer._replace(sharded_classes=table._replace(names=("",) * number))
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


def memory_parts(
    trainer: CentralTrainer, mesh: Mesh, state: State
) -> tuple[dict[str, float], float]:
    """(bytes of the state on a device by purpose, bytes of all gradients)."""
    variables, opt_state = state
    params, table = variables["params"], trainer.sharded_classes
    pattern, names = (f"^{table.path}$", table.names) if table else (None, ())
    sharding = build_step_sharding(trainer.settings, len(names), pattern)
    layout = leaf_sharding(sharding.rules, params, mesh).grads
    is_table = {
        k: jax.tree.map(lambda _, k=k: k == CLASS_TABLE, v) for k, v in params.items()
    }
    optimizer = build_optimizer(trainer.settings, trainer.num_rows)
    is_moment_of_table = state_layout(optimizer, opt_state, is_table, False)
    grads = meshes.shapes_at(params, shardings(mesh, layout))
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
