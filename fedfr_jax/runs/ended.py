"""Finished runs: read and evaluated."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from fedfr_jax.models.saved_model import RECORD
from fedfr_jax.runs import data_digest, report
from fedfr_jax.runs.begin import Begun, begin, end_of
from fedfr_jax.runs.central_stage import read_central
from fedfr_jax.runs.checkpoint import Checkpointer
from fedfr_jax.runs.costs import with_costs
from fedfr_jax.runs.experiment import evaluate, networks_of, numbers, rows_of, show
from fedfr_jax.runs.sinks import write_summary
from fedfr_jax.runs.stage_model import add_calibration, write_model
from fedfr_jax.runs.workdir import named_config
from fedfr_jax.schema import check_choice
from fedfr_jax.types import Central, Experiment, Networks, PyTree


class End(NamedTuple):
    """A stage at its end."""

    networks: Networks
    handed_on: PyTree | None  # what stages that start from this one are given
    begun: Begun | None  # of a federated stage


def networks(
    experiment: Experiment,
    name: str,
    workdir: pathlib.Path,
    *,
    changed: str | None = None,
) -> Networks:
    """The networks of a stage at its end.

    Args:
      changed: as of `data_digest.check`.

    Raises:
      ValueError: for an unknown stage, one that is not trained to its end, or one whose
        data have changed.
    """
    check_choice("method", name, experiment.stages)
    data_digest.check(experiment.task, [workdir / name], changed=changed)
    return _read(experiment, name, workdir, _before(experiment, name, workdir)).networks


def evaluate_experiment(
    experiment: Experiment, workdir, *, changed: str | None = None
) -> dict:
    """Judge a run's last checkpoints again; returns and writes evaluation.json.

    Args:
      changed: as of `data_digest.check`.

    Raises:
      ValueError: when a stage has not been trained to its end, its last checkpoint
        cannot be read, or its data have changed; nothing is trained, and of a stage's
        files only those of its model are written, where they are missing.
    """
    workdir = pathlib.Path(workdir)
    rounds, evaluators = experiment.federation.rounds, experiment.task.evaluators
    for name, stage in experiment.stages.items():
        check_end(workdir / name / "checkpoints", end_of(stage.trainer, rounds))
    folders = [workdir / name for name in experiment.stages]
    data_digest.check(experiment.task, folders, changed=changed)
    found = {}
    for name, end in _ends(experiment, workdir):
        trainer, folder = experiment.stages[name].trainer, workdir / name
        with _if_writable(folder / RECORD):  # which runs of earlier versions lack
            write_model(folder, experiment.task, trainer, end.networks.variables)
        found[name] = evaluate(evaluators, end.networks)
        with _if_writable(folder / RECORD):
            add_calibration(folder, found[name])
        if end.begun:
            rows = rows_of(workdir / name)
            found[name] = with_costs(found[name], evaluators, rows, end.begun, rounds)
    result = {"methods": numbers(found), **named_config(workdir)}
    with _if_writable(workdir / "evaluation.json"):
        write_summary(workdir / "evaluation.json", result)
    show(report.result_table(result))
    return result


@contextlib.contextmanager
def _if_writable(path: pathlib.Path) -> Iterator[None]:
    """Say so where a file of a run cannot be written: its folder may be read only."""
    try:
        yield
    except OSError as error:
        show(f"{path} could not be written: {error}.")


def check_end(folder: pathlib.Path, end: int) -> None:
    """Raise ValueError unless checkpoint `end` is the newest in `folder` and whole."""
    done = None
    if folder.exists():
        with contextlib.closing(
            Checkpointer(folder, is_read_only=True)
        ) as checkpointer:
            done = checkpointer.latest()
            why = checkpointer.why_unreadable(end) if done == end else None
    if done != end:
        raise ValueError(
            f"{folder} must hold checkpoint {end}, got {done}: train it first."
        )
    if why:
        raise ValueError(
            f"checkpoint {end} in {folder} must be readable to be evaluated, got "
            f"{why!r}: `fedfr train` goes on from the one before, where personal rows "
            "of then are kept."
        )


def _ends(experiment: Experiment, workdir) -> Iterator[tuple[str, End]]:
    """The ends of all stages, in order, each read once."""
    handed_on = {None: None}
    wanted = {stage.start_from for stage in experiment.stages.values()}
    for name, stage in experiment.stages.items():
        end = _read(experiment, name, workdir, handed_on[stage.start_from])
        if name in wanted:
            handed_on[name] = end.handed_on
        yield name, end


def _before(experiment, name, workdir) -> PyTree | None:
    """What the stage `name` starts from."""
    start = experiment.stages[name].start_from
    if start is None:
        return None
    before = _before(experiment, start, workdir)
    return _read(experiment, start, workdir, before).handed_on


def _read(experiment: Experiment, name: str, workdir, before: PyTree | None) -> End:
    """The end of the stage `name`, which started from `before`."""
    trainer, folder = experiment.stages[name].trainer, workdir / name
    check_end(folder / "checkpoints", end_of(trainer, experiment.federation.rounds))
    if isinstance(trainer, Central):
        state = read_central(trainer, experiment.mesh, folder, seed=experiment.seed)
        network, apply = trainer.network(state), trainer.network_apply
        return End(Networks(network, apply, None, apply), state, None)
    begun = begin(experiment, trainer, before, folder, is_read_only=True)
    begun.checkpointer.close()
    server, sim = begun.server, begun.sim
    found = networks_of(experiment, trainer, sim, server, begun.store)
    return End(found, trainer.network(server) if trainer.network else None, begun)
