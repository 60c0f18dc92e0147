"""Checkpoints whose rows of classes are found by the names of the identities.

So a training goes on on another number of devices, where the table has other padding,
and with other people: a class keeps its row and what the optimizer has gathered for
it, wherever it was; a class that the checkpoint lacks starts as a new one.

To go on with other people than a finished run, copy its `pretrained/checkpoints` into a
new, empty work folder and start there a config with the new people, `class_parallel`
and more `epochs` than were trained: it goes on at the epoch after the last one.
"""

import json

import jax
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.runs.checkpoint import Checkpointer
from fedfr_jax.types import Central, ClassTable, PyTree

NAMES = "class_names"


def check_labels(trainer: Central) -> None:
    """Raise ValueError for a label that is neither a class of the table nor -1."""
    rows = slice(trainer.first_row, trainer.first_row + trainer.num_rows)
    labels = np.asarray(trainer.dataset.labels[rows])
    wrong = np.flatnonzero((labels < -1) | (labels >= len(trainer.table.names)))
    if len(wrong):
        row, most = trainer.first_row + wrong[0], len(trainer.table.names) - 1
        raise ValueError(
            f"the label of example {row} must lie in [-1, {most}], got "
            f"{labels[wrong[0]]}."
        )


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
