"""Pretraining, then every method from the same start, judged by the same protocols.

The work folder holds a folder per stage (checkpoints, personal rows, metrics.jsonl) and
beside them summary.json, partition.json and the plots. Started again with the same
command it goes on where it stopped; a finished stage is read, not repeated.
"""

import contextlib
import pathlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
import rich
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.data.partition import format_report, report
from fedfr_jax.federated.client import client_key, first_personal_key
from fedfr_jax.federated.model_axis import onto
from fedfr_jax.runs import loop
from fedfr_jax.runs.begin import begin, end_of
from fedfr_jax.runs.checkpoint import Checkpointer
from fedfr_jax.runs.pretraining import everyone, pretrain
from fedfr_jax.runs.report import plots, tables
from fedfr_jax.runs.settings import Federation, Pretraining
from fedfr_jax.runs.sinks import JsonlSink, open_sinks, read_jsonl, write_summary
from fedfr_jax.runs.workdir import Clock
from fedfr_jax.tasks.faces.methods import (
    FaceMethod,
    backbone_features,
    last_simulation,
)
from fedfr_jax.tasks.faces.recognition import Judge, Judgement, Recognition
from fedfr_jax.types import Model, PyTree


class Experiment(NamedTuple):
    """A built config."""

    model: Model
    task: Recognition
    judge: Judge
    mesh: Mesh
    pretraining: Pretraining
    federation: Federation
    methods: Mapping[str, FaceMethod | Pretraining]  # the latter: all images, central
    seed: int


class Stage(NamedTuple):
    """A finished stage's judgements."""

    generic: Judgement
    personalised: Judgement


def run_experiment(
    experiment: Experiment, workdir, *, say: Callable = rich.print
) -> dict:
    """Run or resume every stage; returns the summary that summary.json holds.

    Args:
      say: prints one line or table, in the first process.
    """
    say = say if meshes.is_first() else _say_nothing
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    clock = Clock(workdir / "seconds.json")
    facts = report(experiment.task.partition)
    write_summary(workdir / "partition.json", facts)
    say(format_report(facts))
    variables = start_of(experiment, workdir)
    stages = {"pretrained": judge_single(experiment, variables)}
    clock.note()
    for name, method in experiment.methods.items():
        stages[name] = run_row(experiment, method, variables, workdir / name)
        clock.note()
    summary = {"methods": numbers(stages), "seconds": clock.note()}
    write_summary(workdir / "summary.json", summary)
    paths = draw(stages, workdir)
    say(tables.result_table(summary))
    for path in [workdir / "summary.json", *paths]:
        say(str(path))
    return summary


def evaluate_experiment(experiment: Experiment, workdir, *, say: Callable = rich.print):
    """Judge a run's last checkpoints again; returns and writes evaluation.json.

    Raises:
      ValueError: when a stage has not been trained to its end, or its last checkpoint
        cannot be read; nothing is trained and nothing deleted.
    """
    say = say if meshes.is_first() else _say_nothing
    workdir = pathlib.Path(workdir)
    ends = {"pretrained": experiment.pretraining.epochs}
    rounds = experiment.federation.rounds
    ends |= {
        name: end_of(method, rounds) for name, method in experiment.methods.items()
    }
    for name, end in ends.items():
        check_end(workdir / name / "checkpoints", end)
    variables = start_of(experiment, workdir)
    stages = {"pretrained": judge_single(experiment, variables)}
    for name, method in experiment.methods.items():
        stages[name] = run_row(experiment, method, variables, workdir / name)
    result = {"methods": numbers(stages)}
    write_summary(workdir / "evaluation.json", result)
    say(tables.result_table(result))
    return result


def _say_nothing(*args) -> None:
    del args


def check_end(folder: pathlib.Path, end: int) -> None:
    """Raise ValueError unless checkpoint `end` is the newest in `folder` and whole."""
    done = None
    if folder.exists():
        with contextlib.closing(Checkpointer(folder)) as checkpointer:
            done = checkpointer.latest()
            why = checkpointer.why_unreadable(end) if done == end else None
    if done != end:
        raise ValueError(
            f"{folder} must hold checkpoint {end}, got {done}: train it first."
        )
    if why:
        raise ValueError(
            f"checkpoint {end} in {folder} must be readable to be evaluated, got "
            f"{why!r}: `fedfr train` goes on from the one before."
        )


def numbers(stages: Mapping[str, Stage]) -> dict:
    """{method: {"generic": {...}, "personalised": {...}}}."""
    return {
        name: {
            "generic": stage.generic.metrics,
            "personalised": stage.personalised.metrics,
        }
        for name, stage in stages.items()
    }


def start_of(experiment: Experiment, workdir: pathlib.Path) -> PyTree:
    """What every method starts from: the pretrained backbone and phi."""
    return pretrain(
        experiment.model,
        experiment.task,
        experiment.mesh,
        experiment.pretraining,
        workdir / "pretrained",
        seed=experiment.seed,
    )


def judge_single(experiment: Experiment, variables: PyTree) -> Stage:
    """One network for every client."""
    embed = backbone_features(experiment.model)
    judge, backbone = experiment.judge, variables["backbone"]
    return Stage(
        judge.generic(embed, backbone), judge.personalised(embed, None, backbone)
    )


def run_row(experiment, method: FaceMethod | Pretraining, variables, folder) -> Stage:
    """Train a method from `variables`, or one network on everybody's images."""
    if isinstance(method, FaceMethod):
        return run_method(experiment, method, variables, folder)
    task, seed = everyone(experiment.task), experiment.seed
    variables = pretrain(
        experiment.model, task, experiment.mesh, method, folder, seed=seed
    )
    return judge_single(experiment, variables)


def run_method(experiment, method: FaceMethod, variables, folder) -> Stage:
    """Train one method from `variables`, or read its end, and judge it."""
    federation, judge, mesh = experiment.federation, experiment.judge, experiment.mesh
    begun = begin(experiment, method, variables, folder)
    sim, first, last = begun.sim, begun.first, begun.last_round
    server, store = begun.server, begun.store
    embed = backbone_features(experiment.model)
    judged = lambda server: judge.generic(embed, onto(mesh, method.generic(server)))

    def evaluate(server, store):
        del store
        return {f"generic/{k}": v for k, v in judged(server).metrics.items()}

    rounds = federation.rounds
    period = loop.Period(federation.evaluate_every, federation.checkpoint_every)
    parts = [(sim, first, rounds)]
    if last:
        parts.append((last_simulation(sim, last), max(first, rounds), rounds + 1))
    with (
        open_client_log(folder, first) as clients,
        open_sinks(folder, folder.name, end_of(method, rounds), first) as sinks,
    ):
        for part, first_round, num_rounds in parts:
            server = loop.train(
                part,
                server,
                store,
                begun.checkpointer,
                first_round=first_round,
                num_rounds=num_rounds,
                evaluate=evaluate,
                sinks=sinks,
                client_log=clients,
                period=period,
            )
    begun.checkpointer.close()
    server, key = onto(mesh, (server, sim.key))

    def variables_of(client):
        rows, is_new = store.gather(np.array([client]))
        row = jax.tree.map(lambda x: x[0], rows)
        row = meshes.put(row, meshes.replicated(mesh))
        if is_new[0]:  # never drawn: what it would start from
            own = first_personal_key(client_key(key, client))
            row = method.algorithm.init_personal(own, server)
        return method.algorithm.personalize(server, row)

    return Stage(judged(server), judge.personalised(method.embed, variables_of))


@contextlib.contextmanager
def open_client_log(folder: pathlib.Path, first: int):
    """clients.jsonl of one stage, None but in the first process."""
    if not meshes.is_first():
        yield None
        return
    with contextlib.closing(
        JsonlSink(folder / "clients.jsonl", resume_step=first)
    ) as log:
        yield log


def draw(stages: Mapping[str, Stage], workdir: pathlib.Path) -> list[pathlib.Path]:
    """The four plots of a run; returns their paths. The first process draws."""
    if not meshes.is_first():
        return []
    names = ("roc", "det", "personalised", "rounds")
    paths = [workdir / f"{name}.png" for name in names]
    curves = {n: s.generic.roc for n, s in stages.items()}
    plots.plot_roc(paths[0], curves)
    plots.plot_det(paths[1], curves)
    plots.plot_personalised(
        paths[2], {n: s.personalised.per_client for n, s in stages.items()}
    )
    generic = {
        f"generic/{k}": v for k, v in stages["pretrained"].generic.metrics.items()
    }
    rows = {n: read_jsonl(workdir / n / "metrics.jsonl") for n in stages}
    rows["pretrained"] = [{"round": 0, **generic}]  # a level: it has no rounds
    plots.plot_rounds(paths[3], rows, ("loss", *generic))
    return paths
