"""Experiments: train the stages in order and evaluate them, or evaluate them again.

The run directory has a folder per stage (checkpoints, client states, metrics.jsonl),
summary.json, partition.json and the plots. A run that is started again with the same
command resumes where it stopped; a finished stage is read, not repeated.
"""

import pathlib
from collections.abc import Mapping

from fedfr_jax import manifest
from fedfr_jax.runs import data_digest, stages
from fedfr_jax.runs.checkpoint import check_end
from fedfr_jax.runs.costs import (
    PRIVACY_FILE,
    Evaluations,
    with_spent,
)
from fedfr_jax.runs.evaluation_record import write_environment, write_record
from fedfr_jax.runs.loop import DEFAULT_LIFECYCLE, Lifecycle
from fedfr_jax.runs.report import drawing
from fedfr_jax.runs.report.tables import result_table
from fedfr_jax.runs.sinks import write_json
from fedfr_jax.runs.stages import read_end
from fedfr_jax.runs.terminal import show
from fedfr_jax.runs.timing import measured_time
from fedfr_jax.types import Experiment, PyTree


def run_experiment(
    experiment: Experiment,
    workdir,
    *,
    lifecycle: Lifecycle = DEFAULT_LIFECYCLE,
) -> dict:
    """Run or resume every stage; return the content of summary.json."""
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    write_json(workdir / "partition.json", experiment.task.data_report)
    write_environment(workdir)
    show(experiment.task.data_report_text)
    with measured_time(workdir / "seconds.json") as times:
        lifecycle = lifecycle._replace(times=times)
        evaluations = run_stages(experiment, workdir, lifecycle)
    seconds = times.save()
    summary = summarize(workdir, evaluations) | {"seconds": seconds}
    summary |= times.goodput(seconds)
    write_json(workdir / "summary.json", summary)
    show(result_table(summary))  # before the plots, which may lack a package
    paths = drawing.draw(evaluations, workdir)
    images = [path for path in paths if path.suffix == ".png"]
    for path in [workdir / "summary.json", *images]:
        show(str(path))
    lifecycle.saved()
    return summary


def run_stages(
    experiment: Experiment,
    workdir: pathlib.Path,
    lifecycle: Lifecycle = DEFAULT_LIFECYCLE,
) -> dict[str, Evaluations]:
    """Train every stage, or read it if it is finished, and evaluate it."""
    stages.check_calls(experiment)
    folders = [workdir / name for name in experiment.stages]
    data_digest.check(experiment.task, folders)
    data_digest.record(experiment.task, folders)
    variables: dict[str | None, PyTree] = {None: None}
    needed = {stage.init_from_stage for stage in experiment.stages.values()}
    evaluations = {}
    for name, stage in experiment.stages.items():
        start = variables[stage.init_from_stage]
        end, evaluations[name] = stages.run_stage(
            experiment, stage.trainer, start, workdir / name, lifecycle
        )
        write_record(workdir, name, evaluations[name])
        variables[name] = end if name in needed else None
        if lifecycle.times:
            lifecycle.times.save()
        lifecycle.saved()
    return evaluations


def evaluate_experiment(
    experiment: Experiment, workdir, *, changed: str | None = None
) -> dict:
    """Evaluate a run's last checkpoints again; write and return evaluation.json.

    Args:
      changed: as of `data_digest.check`.
    """
    workdir = pathlib.Path(workdir)
    folders = [workdir / name for name in experiment.stages]
    for folder, stage in zip(folders, experiment.stages.values(), strict=True):
        check_end(folder, read_end(stage.trainer, experiment.federation.rounds, folder))
    data_digest.check(experiment.task, folders, changed=changed)
    evaluations = {}
    for name in experiment.stages:
        end = stages.read_stage(experiment, name, workdir)
        found = stages.evaluate(experiment.task.evaluators, end.models)
        evaluations[name] = with_spent(experiment, found, workdir / name, end.state)
    result = summarize(workdir, evaluations)
    try:
        for name, found in evaluations.items():
            write_record(workdir, name, found)
        write_json(workdir / "evaluation.json", result)
    except OSError as error:
        show(f"{workdir / 'evaluation.json'} could not be written: {error}.")
    show(result_table(result))
    return result


def summarize(workdir: pathlib.Path, evaluations: Mapping[str, Evaluations]) -> dict:
    """{"methods": {stage: {evaluator: {metric: value}}}}, and neighbors of epsilon."""
    methods = {
        stage: {name: dict(x.metrics) for name, x in of_stage.items()}
        for stage, of_stage in evaluations.items()
    }
    paths = [workdir / name / PRIVACY_FILE for name in evaluations]
    neighbors = {
        path.parent.name: manifest.read_object(path)["neighbors"]
        for path in paths
        if path.is_file()
    }
    return {"methods": methods, **({"neighbors": neighbors} if neighbors else {})}
