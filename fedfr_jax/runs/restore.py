"""Finished stages: reading their models, and evaluating them again."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from fedfr_jax.federated.systems.state import plain_server
from fedfr_jax.models.saved_model import RECORD
from fedfr_jax.runs import data_digest, report
from fedfr_jax.runs.central_stage import read_central
from fedfr_jax.runs.checkpoint import check_end
from fedfr_jax.runs.evaluation_record import write_record
from fedfr_jax.runs.experiment import (
    evaluate,
    metrics_by_stage,
    neighbors_of,
    show,
    trained_models,
    with_spent,
)
from fedfr_jax.runs.sinks import write_summary
from fedfr_jax.runs.stage_model import add_calibration, write_model
from fedfr_jax.runs.stage_setup import StageState, read_end, start_stage
from fedfr_jax.schema import check_choice
from fedfr_jax.types import CentralTrainer, Experiment, PyTree, TrainedModels


class FinishedStage(NamedTuple):
    """Models of a finished stage."""

    networks: TrainedModels
    variables: PyTree | None  # for stages that start from this one
    state: StageState | None  # of a federated stage


def load_models(
    experiment: Experiment,
    name: str,
    workdir: pathlib.Path,
    *,
    changed: str | None = None,
) -> TrainedModels:
    """Load the models of a finished stage.

    Args:
      changed: as of `data_digest.check`.

    Raises:
      ValueError: for an unknown stage, one that is not trained to its end, or one whose
        data have changed.
    """
    check_choice("method", name, experiment.stages)
    data_digest.check(experiment.task, [workdir / name], changed=changed)
    return _read(
        experiment, name, workdir, variables_before(experiment, name, workdir)
    ).networks


def evaluate_experiment(
    experiment: Experiment, workdir, *, changed: str | None = None
) -> dict:
    """Evaluate a run's last checkpoints again; write and return evaluation.json.

    Args:
      changed: as of `data_digest.check`.
    """
    workdir = pathlib.Path(workdir)
    rounds, evaluators = experiment.federation.rounds, experiment.task.evaluators
    for name, stage in experiment.stages.items():
        folder = workdir / name
        check_end(folder, read_end(stage.trainer, rounds, folder))
    folders = [workdir / name for name in experiment.stages]
    data_digest.check(experiment.task, folders, changed=changed)
    evaluations = {}
    for name, end in _finished_stages(experiment, workdir):
        trainer, folder = experiment.stages[name].trainer, workdir / name
        with _if_writable(folder / RECORD):  # which runs of earlier versions lack
            write_model(folder, experiment.task, trainer, end.networks.variables)
        results = evaluate(evaluators, end.networks)
        with _if_writable(folder / RECORD):
            add_calibration(folder, results)
        if end.state:
            results = with_spent(results, evaluators, folder, end.state, rounds)
        evaluations[name] = results
        with _if_writable(folder / RECORD):
            write_record(workdir, name, results)
    result = {"methods": metrics_by_stage(evaluations)}
    result |= neighbors_of(folders)
    with _if_writable(workdir / "evaluation.json"):
        write_summary(workdir / "evaluation.json", result)
    show(report.result_table(result))
    return result


@contextlib.contextmanager
def _if_writable(path: pathlib.Path) -> Iterator[None]:
    """Print a message if a file of the run cannot be written."""
    try:
        yield
    except OSError as error:
        show(f"{path} could not be written: {error}.")


def _finished_stages(
    experiment: Experiment, workdir
) -> Iterator[tuple[str, FinishedStage]]:
    """Yield all finished stages in order, each read once."""
    variables = {None: None}
    start_stages = {stage.init_from_stage for stage in experiment.stages.values()}
    for name, stage in experiment.stages.items():
        end = _read(experiment, name, workdir, variables[stage.init_from_stage])
        if name in start_stages:
            variables[name] = end.variables
        yield name, end


def variables_before(experiment, name, workdir) -> PyTree | None:
    """Variables that the stage `name` starts from."""
    start = experiment.stages[name].init_from_stage
    if start is None:
        return None
    before = variables_before(experiment, start, workdir)
    return _read(experiment, start, workdir, before).variables


def _read(
    experiment: Experiment, name: str, workdir, before: PyTree | None
) -> FinishedStage:
    """Read the finished stage `name`, which started from `before`."""
    trainer, folder = experiment.stages[name].trainer, workdir / name
    end = read_end(trainer, experiment.federation.rounds, folder)
    check_end(folder, end)
    if isinstance(trainer, CentralTrainer):
        state = read_central(trainer, experiment.mesh, folder, seed=experiment.seed)
        network, apply = trainer.global_model(state), trainer.apply_global
        return FinishedStage(TrainedModels(network, apply, None, apply), state, None)
    stage_state = start_stage(experiment, trainer, before, folder, is_read_only=True)
    stage_state.checkpointer.close()
    server, sim = plain_server(stage_state.server), stage_state.sim
    models = trained_models(experiment, trainer, sim, server, stage_state.store)
    return FinishedStage(
        models,
        trainer.global_model(server) if trainer.global_model else None,
        stage_state,
    )
