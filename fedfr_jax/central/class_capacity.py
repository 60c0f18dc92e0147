"""Class capacity: how many classes fit the devices' memory.

Checked before training and when a device runs out of memory. A class takes its class
vector, the optimizer state and gradient for it, and its logit for every image of a
batch. The memory of the network is only known to the compiler; see `fedfr plan`.
"""

import contextlib
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from fedfr_jax import trees
from fedfr_jax.central.class_parallel import CLASS_TABLE
from fedfr_jax.central.settings import build_optimizer
from fedfr_jax.mesh import free_bytes, is_out_of_memory
from fedfr_jax.types import CentralTrainer


@contextlib.contextmanager
def explain_memory(trainer: CentralTrainer, mesh: Mesh) -> Iterator[None]:
    """Context of a training that explains errors about device memory.

    Raises:
      ValueError: when the classes alone need more memory than is free, and when a
        device runs out of memory: with settings that help and the classes that fit.
    """
    classes = _classes(trainer, mesh)
    if trainer.sharded_classes and classes and classes[0] > classes[1]:
        raise ValueError(
            f"the number of classes must be at most {classes[1]}, whose class vectors, "
            f"optimizer state, gradients and logits fit the free memory of {mesh.size} "
            f"devices, got {classes[0]}: {_advice(trainer)}."
        )
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        fitting = ""
        if classes:
            fitting = (
                f", and {classes[0]} classes, of which {classes[1]} fit without the "
                "network's activations"
            )
        raise ValueError(
            "central training must fit the devices' memory, got "
            f"batch_size {trainer.settings.batch_size} in "
            f"{trainer.settings.gradient_accumulation_steps} micro_batches{fitting}: "
            f"{_advice(trainer)}."
        ) from error


def _classes(trainer: CentralTrainer, mesh: Mesh) -> tuple[int, int] | None:
    """(number of classes, how many fit); None without classes or if unknown."""
    shapes = jax.eval_shape(trainer.init, jax.random.key(0))["params"]
    path = trainer.sharded_classes.path if trainer.sharded_classes else CLASS_TABLE
    free = free_bytes(mesh)
    if free is None or path not in shapes or not jax.tree.leaves(shapes[path]):
        return None
    names = trainer.sharded_classes and trainer.sharded_classes.names
    number = len(names) if names else shapes[path].shape[0]
    return number, int(free // bytes_per_class(trainer, shapes, path, mesh))


def bytes_per_class(trainer: CentralTrainer, shapes, path: str, mesh: Mesh) -> float:
    """Least memory of a class in bytes, on each device.

    Args:
      shapes: of the parameters.
      path: of the parameter of classes.
    """
    settings = trainer.settings
    optimizer = build_optimizer(settings, trainer.num_rows)
    rate = max(settings.class_rates) if trainer.sharded_classes else 1.0
    stored = _row((shapes, jax.eval_shape(optimizer.init, shapes)), path)
    rows = stored + rate * _row(shapes, path)
    logits = 0 if settings.class_chunk_size else 4 * rate
    images = settings.batch_size / settings.gradient_accumulation_steps / mesh.size
    return rows / (mesh.size if trainer.sharded_classes else 1) + logits * images


def _row(tree, path) -> int:
    """Bytes of one class in all leaves whose path ends in `path`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    tables = [x for p, x in leaves if f"/{trees.path_name(p)}".endswith(f"/{path}")]
    return sum(x.size // x.shape[0] * x.dtype.itemsize for x in tables)


def _advice(trainer: CentralTrainer) -> str:
    advice = "a smaller batch_size or more gradient_accumulation_steps"
    if not trainer.settings.class_parallel:
        advice = f"class_parallel=True, {advice}"
    elif not trainer.settings.class_chunk_size:
        advice = f"a class_chunk_size, {advice}"
    return f"set {advice}"
