"""A central stage: epochs of one network, with sinks, checks and checkpoints."""

import pathlib

import jax
from jax.sharding import Mesh

from fedfr_jax.central.epochs import build_epochs
from fedfr_jax.central.settings import optimizer_of
from fedfr_jax.runs import loop
from fedfr_jax.runs.checkpoint import Checkpointer
from fedfr_jax.runs.sinks import open_sinks
from fedfr_jax.stream import placed
from fedfr_jax.types import Central, PyTree

FIRST_WEIGHTS = 2**31  # folded into the seed; clients fold their ids, below 2^31


def train_central(
    trainer: Central, mesh: Mesh, folder: pathlib.Path, *, seed: int
) -> PyTree:
    """Train, or go on, under `folder`; returns the variables at the end."""
    settings = trainer.settings
    epochs = build_epochs(
        trainer.loss,
        optimizer_of(settings, trainer.num_rows),
        trainer.feed,
        mesh,
        first_row=trainer.first_row,
        num_rows=trainer.num_rows,
        seed=seed,
    )
    key = jax.random.fold_in(jax.random.key(seed), FIRST_WEIGHTS)
    state = epochs.init(trainer.init(key))
    checkpointer = Checkpointer(folder / "checkpoints")
    first, state = checkpointer.restore(state) or (0, state)
    if first < settings.epochs:
        table = placed(trainer.dataset, mesh)
        every = settings.checkpoint_every
        with open_sinks(folder, folder.name, settings.epochs, first) as sinks:
            for epoch in range(first, settings.epochs):
                state, scalars = epochs.run(state, table, epoch)
                loop.check_scalars(scalars, f"epoch {epoch}", checkpointer)
                loop.check_state(state, f"epoch {epoch}", checkpointer)
                for sink in sinks:
                    sink(epoch, scalars)
                if loop.is_due(every, epoch, settings.epochs - 1):
                    checkpointer.save(epoch + 1, state)
    if checkpointer.latest() is None:  # no epoch: the weights that were given
        checkpointer.save(0, state)
    checkpointer.close()
    return state.variables
