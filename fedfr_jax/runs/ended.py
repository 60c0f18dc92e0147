"""What a finished run has trained, without judging it again."""

import pathlib

from fedfr_jax.runs.begin import begin, end_of
from fedfr_jax.runs.central_stage import train_central
from fedfr_jax.runs.experiment import check_end, networks_of
from fedfr_jax.schema import check_choice
from fedfr_jax.types import Central, Experiment, Networks, PyTree


def networks(experiment: Experiment, name: str, workdir: pathlib.Path) -> Networks:
    """The networks of a stage at its end.

    Raises:
      ValueError: for an unknown stage, or one that is not trained to its end.
    """
    check_choice("method", name, experiment.stages)
    stage, folder = experiment.stages[name], workdir / name
    trainer = stage.trainer
    end = end_of(trainer, experiment.federation.rounds)
    check_end(folder / "checkpoints", end)
    if isinstance(trainer, Central):
        variables = trainer.network(_central(experiment, name, workdir))
        return Networks(variables, trainer.network_apply, None, trainer.network_apply)
    before = _before(experiment, stage.start_from, workdir)
    begun = begin(experiment, trainer, before, folder)
    begun.checkpointer.close()
    return networks_of(experiment, trainer, begun.sim, begun.server, begun.store)


def _central(experiment: Experiment, name: str, workdir: pathlib.Path) -> PyTree:
    trainer = experiment.stages[name].trainer
    mesh, seed = experiment.mesh, experiment.seed
    return train_central(trainer, mesh, workdir / name, seed=seed)


def _before(experiment, name, workdir) -> PyTree | None:
    """What the stage `name` hands to those that start from it."""
    if name is None:
        return None
    if isinstance(experiment.stages[name].trainer, Central):
        return _central(experiment, name, workdir)
    return networks(experiment, name, workdir).variables
