"""Central stages, and class vectors in their checkpoints.

Class vectors in a checkpoint are found by the names of the identities, so training can
resume on another number of devices, where the class matrix has other padding, and with
other identities: a class keeps its vector and optimizer state, and a class that the
checkpoint lacks is newly initialized.

To continue a finished run with other identities, copy its `pretrained/checkpoints` into
a new, empty run directory and start there a config with these identities,
`class_parallel` and more `epochs` than were trained: it resumes at the next epoch.
"""

import functools
import json
import pathlib
import time
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.central.epochs import build_epochs
from fedfr_jax.central.settings import build_mesh, explain_memory
from fedfr_jax.data.stream import place_examples
from fedfr_jax.models.flops import PASSES
from fedfr_jax.runs import loop
from fedfr_jax.runs.checkpoint import Checkpointer
from fedfr_jax.runs.loop import DEFAULT_LIFECYCLE, Lifecycle
from fedfr_jax.runs.sinks import Sink, cover_logs
from fedfr_jax.runs.timing import speeds
from fedfr_jax.types import CentralTrainer, FederatedTrainer, PyTree, ShardedClasses

NAMES = "class_names"


def check_labels(trainer: CentralTrainer, classes: ShardedClasses) -> None:
    """Raise ValueError for a label that is neither a class nor -1."""
    rows = slice(trainer.first_row, trainer.first_row + trainer.num_rows)
    labels, last = np.asarray(trainer.dataset.labels[rows]), len(classes.names) - 1
    for i in np.flatnonzero((labels < -1) | (labels > last)):
        raise ValueError(
            f"the label of example {trainer.first_row + i} must be in [-1, {last}], "
            f"got {labels[i]}."
        )


def add_names(state: PyTree, classes: ShardedClasses) -> PyTree:
    """Add the class names to the state, as a checkpoint stores them."""
    text = json.dumps(classes.names).encode()
    return {"state": state, NAMES: np.frombuffer(text, np.uint8)}


def restore(
    checkpointer: Checkpointer, state: PyTree, classes: ShardedClasses
) -> tuple[int, PyTree] | None:
    """Restore the newest checkpoint as (step, state sharded as `state`), or None.

    Args:
      state: of a new training, from which new classes take their rows.
    """

    def has_rows(name):  # of the class matrix, or of its optimizer state
        return f"/{name}".endswith(f"/{classes.path}")

    def is_free(name):
        return name == NAMES or has_rows(name)

    restored = checkpointer.restore(add_names(state, classes), is_free)
    if restored is None:
        return None
    step, saved = restored
    names = json.loads(np.asarray(saved[NAMES]).tobytes())
    row_of_name = {name: i for i, name in enumerate(names)}
    old = np.array([row_of_name.get(name, -1) for name in classes.names])

    def select(path, new, saved):
        has_classes = has_rows(trees.path_name(path))
        return _permute_classes(new, saved, old) if has_classes else saved

    return step, jax.tree_util.tree_map_with_path(select, state, saved["state"])


def _permute_classes(new, saved, old):
    """`new` [R, ...] with the rows old [M] of `saved`; unchanged where old is -1."""
    rows = np.array(meshes.fetch(new))
    kept_classes = np.flatnonzero(old >= 0)
    rows[kept_classes] = np.asarray(saved)[old[kept_classes]]
    return meshes.put_global(rows, new.sharding)


FIRST_WEIGHTS = 2**31  # folded into the seed; clients fold their ids, below 2^31


def train_central(
    trainer: CentralTrainer,
    mesh: Mesh,
    folder: pathlib.Path,
    *,
    seed: int,
    sinks: Sequence[Sink] = (),
    lifecycle: Lifecycle = DEFAULT_LIFECYCLE,
) -> PyTree:
    """Train or resume a central stage under `folder`; return the final variables.

    They are replicated on the devices of `mesh`, except sharded class vectors, which
    are in host memory without their padding.
    """
    own_mesh = build_mesh(trainer.settings, mesh)
    if trainer.sharded_classes:
        check_labels(trainer, trainer.sharded_classes)
    with explain_memory(trainer.settings):
        state = _train_epochs(trainer, own_mesh, folder, seed, sinks, lifecycle)
    return _unshard(state.variables, trainer, mesh)


def read_central(
    trainer: CentralTrainer, mesh: Mesh, folder: pathlib.Path, *, seed: int
) -> PyTree:
    """Final variables of a finished stage, as `train_central` returned; read only."""
    own_mesh = build_mesh(trainer.settings, mesh)
    with explain_memory(trainer.settings):
        epochs = build_epochs(trainer, own_mesh, seed)
        checkpointer, _, state = _restore(
            trainer, epochs, folder, seed, is_read_only=True
        )
    checkpointer.close()
    return _unshard(state.variables, trainer, mesh)


def _restore(trainer, epochs, folder, seed, **kind) -> tuple[Checkpointer, int, PyTree]:
    """(checkpointer, epoch to come, state) of the newest checkpoint, or a new stage."""
    key = jax.random.fold_in(jax.random.key(seed), FIRST_WEIGHTS)
    state = epochs.init(functools.partial(trainer.init, key))
    checkpointer = Checkpointer(folder / "checkpoints", **kind)
    if trainer.sharded_classes:
        restored = restore(checkpointer, state, trainer.sharded_classes)
    else:
        restored = checkpointer.restore(state)
    first, state = restored or (0, state)
    return checkpointer, first, state


def _train_epochs(
    trainer: CentralTrainer,
    own_mesh: Mesh,
    folder: pathlib.Path,
    seed: int,
    sinks: Sequence[Sink],
    lifecycle: Lifecycle,
):
    """Train to the last epoch; return the state."""
    settings = trainer.settings
    epochs = build_epochs(trainer, own_mesh, seed)
    checkpointer, first, state = _restore(
        trainer, epochs, folder, seed, is_mirrored=lifecycle.is_mirrored
    )
    data = place_examples(trainer.dataset, own_mesh) if first < settings.epochs else ()
    images, flops = epochs.num_steps * settings.batch_size, training_flops(trainer)
    loop.note_compiling(sinks)
    for epoch in range(first, settings.epochs):
        started = time.perf_counter()
        with lifecycle.timed("training"):
            state, scalars = epochs.run(state, data, epoch)
        seconds = time.perf_counter() - started
        scalars |= speeds(seconds, images=images, flops_per_image=flops)
        loop.check_epoch(scalars, state, epoch, checkpointer)
        for sink in sinks:
            sink(epoch, scalars)
        _save_epoch(trainer, checkpointer, epoch, state, sinks, lifecycle)
    if checkpointer.latest() is None:  # no epochs: the initial weights
        checkpointer.save(0, _with_names(state, trainer))
    checkpointer.close()
    return state


def _save_epoch(trainer, checkpointer, epoch, state, sinks, lifecycle) -> None:
    """Save a checkpoint if due; raise RunInterrupted if the run was asked to end."""
    last = trainer.settings.epochs - 1
    must_end = epoch < last and lifecycle.must_end()
    if must_end or loop.is_due(trainer.settings.checkpoint_every, epoch, last):
        with lifecycle.timed("checkpoint"):
            cover_logs(sinks)
            checkpointer.save(epoch + 1, _with_names(state, trainer))
            lifecycle.saved()
    if must_end:
        raise loop.interrupted(checkpointer, f"epoch {epoch + 1}")


def _with_names(state: PyTree, trainer: CentralTrainer) -> PyTree:
    classes = trainer.sharded_classes
    return add_names(state, classes) if classes else state


def training_flops(trainer: CentralTrainer | FederatedTrainer) -> int:
    """FLOPs of training the model on one image; 0 if it does not count them."""
    return PASSES * trainer.count_flops() if trainer.count_flops else 0


def _unshard(variables, trainer, mesh):
    """Gather `variables` for other stages and evaluators."""
    whole, classes = meshes.replicated(mesh), trainer.sharded_classes
    if classes is None:
        return meshes.put_global(variables, whole)
    params = variables["params"]
    rows = meshes.fetch(params[classes.path])[: len(classes.names)]
    variables = {**variables, "params": {**params, classes.path: None}}
    variables = meshes.put_global(variables, whole)
    variables["params"][classes.path] = rows
    return variables
