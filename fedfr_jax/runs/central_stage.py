"""A central stage: epochs of one network, with sinks, checks and checkpoints."""

import functools
import pathlib
import time
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.central.epochs import Epochs, build_epochs
from fedfr_jax.central.settings import mesh_of, optimizer_of, spread_of
from fedfr_jax.runs import class_memory, class_tables, loop
from fedfr_jax.runs.checkpoint import Checkpointer
from fedfr_jax.runs.first_calls import FirstCall
from fedfr_jax.runs.sinks import open_sinks
from fedfr_jax.runs.stage_model import forget_model
from fedfr_jax.stream import placed
from fedfr_jax.types import Central, PyTree

FIRST_WEIGHTS = 2**31  # folded into the seed; clients fold their ids, below 2^31


def train_central(
    trainer: Central, mesh: Mesh, folder: pathlib.Path, *, seed: int
) -> PyTree:
    """Train, or go on, under `folder`; returns the variables at the end.

    They are whole on the devices of `mesh`, but for a table of classes, which comes
    without its padding into the memory of the host.
    """
    own_mesh = mesh_of(trainer.settings, mesh)
    if trainer.table:
        class_tables.check_labels(trainer)
    with class_memory.explained(trainer, own_mesh):
        state = _trained(trainer, own_mesh, folder, seed)
    return _whole(state.variables, trainer, mesh)


def read_central(
    trainer: Central, mesh: Mesh, folder: pathlib.Path, *, seed: int
) -> PyTree:
    """What `train_central` returned at the stage's end; `folder` stays as it is."""
    own_mesh = mesh_of(trainer.settings, mesh)
    with class_memory.explained(trainer, own_mesh):
        epochs = epochs_of(trainer, own_mesh, seed)
        found = _restored(trainer, epochs, folder, seed, is_read_only=True)
    found.checkpointer.close()
    return _whole(found.state.variables, trainer, mesh)


class _Restored(NamedTuple):
    """A central stage at its newest checkpoint, or before its first epoch."""

    checkpointer: Checkpointer
    first: int  # the epoch to come
    state: PyTree


def _restored(trainer, epochs, folder, seed, *, is_read_only=False) -> _Restored:
    """The state in the newest checkpoint under `folder`, or a new one."""
    key = jax.random.fold_in(jax.random.key(seed), FIRST_WEIGHTS)
    state = epochs.init(functools.partial(trainer.init, key))
    checkpointer = Checkpointer(folder / "checkpoints", is_read_only=is_read_only)
    if trainer.table:
        found = class_tables.restore(checkpointer, state, trainer.table)
    else:
        found = checkpointer.restore(state)
    return _Restored(checkpointer, *(found or (0, state)))


def _trained(trainer: Central, own_mesh: Mesh, folder: pathlib.Path, seed: int):
    """The state after the last epoch."""
    settings, table = trainer.settings, trainer.table
    epochs = epochs_of(trainer, own_mesh, seed)
    checkpointer, first, state = _restored(trainer, epochs, folder, seed)
    if first < settings.epochs:
        forget_model(folder)
        data = placed(trainer.dataset, own_mesh)
        every = settings.checkpoint_every
        with open_sinks(folder, folder.name, settings.epochs, first) as sinks:
            facts = folder.name, state, settings.batch_size
            first_call = FirstCall(sinks, own_mesh, *facts)
            for epoch in range(first, settings.epochs):
                started = time.perf_counter()
                if epoch == first:
                    first_call.begin()
                state, scalars = epochs.run(state, data, epoch)
                first_call.took(time.perf_counter() - started)
                loop.check_epoch(scalars, state, epoch, checkpointer)
                for sink in sinks:
                    sink(epoch, scalars)
                if loop.is_due(every, epoch, settings.epochs - 1):
                    saved = class_tables.with_names(state, table) if table else state
                    checkpointer.save(epoch + 1, saved)
    if checkpointer.latest() is None:  # no epoch: the weights that were given
        checkpointer.save(0, class_tables.with_names(state, table) if table else state)
    checkpointer.close()
    return state


def epochs_of(trainer: Central, mesh: Mesh, seed: int) -> Epochs:
    """The trainer's epochs on the mesh of its settings."""
    settings, table = trainer.settings, trainer.table
    pattern, names = (f"^{table.path}$", table.names) if table else (None, ())
    return build_epochs(
        trainer.loss,
        optimizer_of(settings, trainer.num_rows),
        trainer.feed,
        mesh,
        first_row=trainer.first_row,
        num_rows=trainer.num_rows,
        seed=seed,
        lists=trainer.order,
        mark=trainer.mark,
        spread=spread_of(settings, len(names), pattern),
        class_rates=settings.class_rates,
    )


def _whole(variables, trainer, mesh):
    """`variables` as other stages and evaluators take them."""
    table = trainer.table
    if table:
        params = variables["params"]
        rows = meshes.fetch(params[table.path])[: len(table.names)]
        params = {**params, table.path: None}
        variables = {**variables, "params": params}
    variables = meshes.put(variables, meshes.replicated(mesh))
    if table:
        variables["params"][table.path] = rows
    return variables
