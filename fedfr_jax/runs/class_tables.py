"""Checkpoints whose rows of classes are found by the names of the identities.

So a training goes on on another number of devices, where the table has other padding,
and with other people: a class keeps its row and what the optimizer has gathered for
it, wherever it was; a class that the checkpoint lacks starts as a new one.
"""

import json
import math

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.federated.memory import free_bytes
from fedfr_jax.runs.checkpoint import Checkpointer
from fedfr_jax.types import ClassTable, PyTree

NAMES = "class_names"


def check_fit(
    shapes: PyTree,
    optimizer: optax.GradientTransformation,
    table: ClassTable,
    mesh: Mesh,
    class_rate: float = 1.0,
) -> None:
    """Raise ValueError when rows of classes alone are more than a device has free.

    Args:
      shapes: of the parameters; the table is cut over all devices of the mesh.
      class_rate: share of the classes in a step, which have gradients.
    """
    free = free_bytes(mesh)
    kept = _bytes_of_a_row((shapes, jax.eval_shape(optimizer.init, shapes)), table)
    each = math.ceil(kept + class_rate * _bytes_of_a_row(shapes, table))
    devices, number = mesh.size, len(table.names)
    if free is not None and each * number > free * devices:
        raise ValueError(
            f"the number of classes must be at most {free * devices // each}, whose "
            f"rows, momentum and gradients fit what {devices} devices have free, got "
            f"{number}."
        )


def _bytes_of_a_row(tree, table):
    """Of a class, in all leaves that are the table's."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    rows = [x for path, x in found if _is_of(trees.path_name(path), table)]
    return sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in rows)


def with_names(state: PyTree, table: ClassTable) -> PyTree:
    """What a checkpoint holds: the state, and the classes of the table's first rows."""
    text = json.dumps(table.names).encode()
    return {"state": state, NAMES: np.frombuffer(text, np.uint8)}


def restore(
    checkpointer: Checkpointer, state: PyTree, table: ClassTable
) -> tuple[int, PyTree] | None:
    """Newest checkpoint as (step, a state that lies as `state` does), None without one.

    Args:
      state: of a new training, from which new classes take their rows.
    """
    is_row = lambda name: _is_of(name, table)
    free = lambda name: name == NAMES or is_row(name)
    found = checkpointer.restore(with_names(state, table), free)
    if found is None:
        return None
    step, saved = found
    names = json.loads(np.asarray(saved[NAMES]).tobytes())
    place = {name: i for i, name in enumerate(names)}
    old = np.array([place.get(name, -1) for name in table.names])

    def one(path, new, saved):
        return _arranged(new, saved, old) if is_row(trees.path_name(path)) else saved

    return step, jax.tree_util.tree_map_with_path(one, state, saved["state"])


def _arranged(new, saved, old):
    """`new` [R, ...] with the rows old [M] of `saved`, its own where old is -1."""
    rows = np.array(meshes.fetch(new))
    known = np.flatnonzero(old >= 0)
    rows[known] = np.asarray(saved)[old[known]]
    return meshes.put(rows, new.sharding)


def _is_of(name, table):
    """Whether a path ends in the table's: its parameter, or the optimizer's of it."""
    return f"/{name}".endswith(f"/{table.path}")
