"""Experiments: train the stages in order, evaluate them, count their costs.

The run directory has a folder per stage (checkpoints, client states, metrics.jsonl),
summary.json, partition.json and the plots. A run that is started again with the same
command resumes where it stopped; a finished stage is read, not repeated.
"""

import contextlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import rich.console

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.communication import count_communication
from fedfr_jax.federated.inference import client_models
from fedfr_jax.federated.model_parallel import put_on_mesh
from fedfr_jax.federated.privacy.accountant import Accountant, affordable_rounds
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.systems.state import plain_server
from fedfr_jax.federated.systems.stragglers import num_trained
from fedfr_jax.metric_names import NOT_PRIVATE
from fedfr_jax.runs import data_digest, loop, report
from fedfr_jax.runs.central_stage import train_central, training_flops
from fedfr_jax.runs.evaluation_record import write_environment, write_record
from fedfr_jax.runs.goodput import goodput, measured_time
from fedfr_jax.runs.lifecycle import DEFAULT_LIFECYCLE, Lifecycle
from fedfr_jax.runs.sinks import JsonlSink, read_jsonl, write_summary
from fedfr_jax.runs.stage_model import add_calibration, forget_model, write_model
from fedfr_jax.runs.stage_setup import (
    StageState,
    check_calls,
    final_simulation,
    read_end,
    start_stage,
)
from fedfr_jax.runs.terminal import StageFacts
from fedfr_jax.runs.trackers import (
    DEFAULT_LOGGING,
    Logging,
    open_sinks,
    show_at_end,
)
from fedfr_jax.runs.workdir import ElapsedTime, named_config
from fedfr_jax.text import printable
from fedfr_jax.types import (
    CentralTrainer,
    Evaluation,
    Evaluator,
    Experiment,
    FederatedTrainer,
    PyTree,
    TrainedModels,
)

MEGABYTE = 1e6


def with_costs(
    found: Mapping[str, Evaluation],
    evaluators: Mapping[str, Evaluator],
    rows: Sequence[Mapping[str, Any]],
    begun: StageState,
    rounds: int,
) -> dict[str, Evaluation]:
    """Add rounds to target and the evaluation "communication" to evaluations.

    Args:
      rows: of the stage's metrics.jsonl; where it has lost some, rounds to a target are
        left out, and a line says so.
      rounds: of the whole stage.
    """
    added = dict(found)
    if lost := set(range(1, rounds + 1)) - {row["round"] for row in rows}:
        _note_lost(lost)
    else:
        for name, of in found.items():
            reached = rounds_to_target(name, evaluators[name], rows, of)
            added[name] = of._replace(metrics={**of.metrics, **reached})
    sent = communication(begun, rounds)
    return {**added, "communication": Evaluation(sent)} if sent else added


def _note_lost(rounds: set[int]) -> None:
    if meshes.is_first_process():
        first = ", ".join(map(str, sorted(rounds)[:3]))
        print(
            f"metrics.jsonl has lost {len(rounds)} rounds ({first}...): the rounds "
            "to a target are left out.",
            flush=True,
        )


def rounds_to_target(
    name: str, evaluator: Evaluator, rows: Sequence[Mapping], found: Evaluation
) -> dict[str, int | None]:
    """{"rounds_to_TARGET": first round, from 1, whose evaluation reached the target}.

    None where none did; nothing where the evaluator has found nothing.
    """

    def first(metric, target):
        values = ((row["round"], row.get(f"{name}/{metric}")) for row in rows)
        reached = (i for i, x in values if x is not None and x >= target)
        return next(reached, None)

    return {
        f"rounds_to_{target:g}": first(metric, target)
        for metric, target in evaluator.targets.items()
        if metric in found.metrics
    }


def communication(begun: StageState, rounds: int) -> dict[str, float]:
    """Megabytes per client and round, uploaded and downloaded, and in total."""
    sim = begun.sim
    each = count_communication(sim, begun.server, begun.store.template)
    if each is None:
        return {}
    senders = num_trained(sim.stragglers, sim.cohort_size)  # the dropped only receive
    total = (each.up * senders + each.down * sim.num_places) * rounds
    sizes = {"upload_mb": each.up, "download_mb": each.down, "total_mb": total}
    return {name: size / MEGABYTE for name, size in sizes.items()}


def is_private(accountant: Accountant | None) -> bool:
    """Whether rounds are private: clipping without noise is not."""
    return accountant is not None and accountant.mechanism.noise_multiplier > 0


def privacy_spent(accountant: Accountant | None, rounds: int) -> dict[str, Evaluation]:
    """A section "privacy": epsilon of a private method after all rounds, at delta."""
    if not is_private(accountant):
        return {}
    epsilon, delta = accountant.epsilon_bound(rounds), accountant.mechanism.delta
    return {"privacy": Evaluation({"epsilon": epsilon, "delta": delta})}


def note_privacy(accountant: Accountant | None, folder: pathlib.Path) -> None:
    """privacy.json of a private method: what in its folder is private, what is not."""
    if is_private(accountant) and meshes.is_first_process():
        write_summary(folder / "privacy.json", PRIVACY_NOTE)


PRIVACY_NOTE = MappingProxyType(
    {
        "private": ["the global model", "epsilon", "delta", "clip_norm"],
        NOT_PRIVATE: {
            "clients.jsonl": "numbers of single clients",
            "metrics.jsonl": "all but epsilon, delta and clip_norm: exact means over "
            "clients",
            "evaluation.json": "what is marked there: measured on clients' own data",
            "store": "the clients' own state, which never leaves a client",
            "plots and tables": "what is made of these",
        },
    }
)
Evaluations = Mapping[str, Evaluation]  # by evaluator


def show(what) -> None:
    """Print text, or a table as wide as needed, in the first process."""
    if not meshes.is_first_process():
        return
    if isinstance(what, str):
        print(printable(what, keep="\n"), flush=True)
        return
    console = rich.console.Console()
    wide = rich.console.Console(width=10_000)
    width = max(console.width, wide.measure(what).maximum)
    rich.console.Console(width=width).print(what)


def run_experiment(
    experiment: Experiment,
    workdir,
    *,
    logging: Logging = DEFAULT_LOGGING,
    lifecycle: Lifecycle = DEFAULT_LIFECYCLE,
) -> dict:
    """Run or resume every stage; return the content of summary.json."""
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    clock = ElapsedTime(workdir / "seconds.json")
    write_summary(workdir / "partition.json", experiment.task.data_report)
    write_environment(workdir)
    show(experiment.task.data_report_text)
    with measured_time(clock.uses) as times:
        lifecycle = lifecycle._replace(times=times)
        found = run_stages(experiment, workdir, clock, logging, lifecycle)
    seconds = clock.note(times.seconds)
    summary = {"methods": metrics_by_stage(found), "seconds": seconds}
    summary |= {**goodput(times.seconds, seconds), **named_config(workdir)}
    write_summary(workdir / "summary.json", summary)
    show(report.result_table(summary))  # before the plots, which may lack a package
    rows = {name: read_metrics(workdir / name) for name in found}
    facts = experiment.task.data_report
    paths = report.draw(found, rows, workdir, facts=facts, say=show)
    pictures = [path for path in paths if path.suffix == ".png"]
    for path in [workdir / "summary.json", *pictures]:
        show(str(path))
    lifecycle.saved()
    return summary


def read_metrics(folder: pathlib.Path) -> list[dict]:
    """Lines of a stage's metrics.jsonl."""
    path = folder / "metrics.jsonl"
    return read_jsonl(path) if path.exists() else []


def metrics_by_stage(found: Mapping[str, Evaluations]) -> dict:
    """{stage: {evaluator: {metric: value}}}."""
    return {
        stage: {name: dict(of.metrics) for name, of in evaluations.items()}
        for stage, evaluations in found.items()
    }


def run_stages(
    experiment: Experiment,
    workdir: pathlib.Path,
    clock: ElapsedTime | None = None,
    logging: Logging = DEFAULT_LOGGING,
    lifecycle: Lifecycle = DEFAULT_LIFECYCLE,
) -> dict[str, Evaluations]:
    """Train every stage, or read it if it is finished, and evaluate it."""
    check_calls(experiment)
    ends, found = {}, {}
    folders = [workdir / name for name in experiment.stages]
    data_digest.check(experiment.task, folders)
    data_digest.keep(experiment.task, folders)
    wanted = {stage.init_from_stage for stage in experiment.stages.values()}
    for name, stage in experiment.stages.items():
        is_central = isinstance(stage.trainer, CentralTrainer)
        run = run_central if is_central else run_federated
        before = ends.get(stage.init_from_stage)
        end, found[name] = run(
            experiment, stage.trainer, before, workdir / name, logging, lifecycle
        )
        write_record(workdir, name, found[name])
        if name in wanted:
            ends[name] = end
        if clock:
            clock.note(lifecycle.times and lifecycle.times.seconds)
        lifecycle.saved()
    return found


def run_central(
    experiment: Experiment,
    trainer: CentralTrainer,
    before: PyTree,
    folder: pathlib.Path,
    logging: Logging = DEFAULT_LOGGING,
    lifecycle: Lifecycle = DEFAULT_LIFECYCLE,
) -> tuple[PyTree, Evaluations]:
    """Train or read a central stage: (its variables, evaluations)."""
    del before
    mesh, seed, end = experiment.mesh, experiment.seed, trainer.settings.epochs
    is_new = len(read_metrics(folder)) < end
    variables = train_central(
        trainer, mesh, folder, seed=seed, logging=logging, lifecycle=lifecycle
    )
    apply, network = trainer.apply_global, trainer.global_model(variables)
    networks = TrainedModels(network, apply, None, apply)
    with lifecycle.timed("evaluation"):
        found = saved_and_evaluated(experiment, trainer, networks, folder)
    if is_new:
        show_at_end(folder, end - 1, with_prefix(found), logging)
    return variables, found


def saved_and_evaluated(
    experiment: Experiment,
    trainer: FederatedTrainer | CentralTrainer,
    networks: TrainedModels,
    folder: pathlib.Path,
) -> dict[str, Evaluation]:
    """Save a stage's model in its folder, and evaluate it."""
    write_model(folder, experiment.task, trainer, networks.variables)
    found = evaluate(experiment.task.evaluators, networks)
    add_calibration(folder, found)
    return found


def evaluate(
    evaluators: Mapping[str, Evaluator], networks: TrainedModels
) -> dict[str, Evaluation]:
    """Run every evaluator on a stage's models."""
    with jax.profiler.TraceAnnotation("evaluate"):
        return {name: of.evaluate(networks) for name, of in evaluators.items()}


def run_federated(
    experiment: Experiment,
    trainer: FederatedTrainer,
    before: PyTree,
    folder: pathlib.Path,
    logging: Logging = DEFAULT_LOGGING,
    lifecycle: Lifecycle = DEFAULT_LIFECYCLE,
) -> tuple[PyTree, Evaluations]:
    """Train a method, or read it if finished: (global model, evaluations)."""
    federation, evaluators = experiment.federation, experiment.task.evaluators
    begun = start_stage(
        experiment, trainer, before, folder, is_mirrored=lifecycle.is_mirrored
    )
    sim, first, last = begun.sim, begun.first, begun.last_round
    server, store = begun.server, begun.store
    rounds = affordable_rounds(sim.accountant, federation.rounds)
    parts = [(sim, first, rounds)]
    if last:
        parts.append((final_simulation(sim, last), max(first, rounds), rounds + 1))
    end = read_end(trainer, rounds)
    note_privacy(sim.accountant, folder)
    if first < end:
        forget_model(folder)
    with (
        open_client_log(folder, first) as clients,
        open_sinks(
            folder,
            folder.name,
            end,
            first,
            logging=logging,
            facts=StageFacts(sim.cohort_size, sim.batching.batch_size),
        ) as sinks,
    ):
        to = loop.RunOutputs(
            store,
            begun.checkpointer,
            evaluators_during_training(experiment, trainer, sim),
            sinks,
            clients,
            loop.intervals(federation),
            lifecycle,
            training_flops(trainer),
        )
        for part, first_round, num_rounds in parts:
            server = loop.train(part, server, to, first_round, num_rounds)
        store.keep_newest()  # the last checkpoint is whole
        with lifecycle.timed("evaluation"):
            models = trained_models(experiment, trainer, sim, server, store)
            found = saved_and_evaluated(experiment, trainer, models, folder)
    begun.checkpointer.close()
    if first < end:  # what is evaluated during training is there already
        late = {x: of for x, of in found.items() if not evaluators[x].during_training}
        show_at_end(folder, end - 1, with_prefix(late), logging)
    found = with_costs(found, evaluators, read_metrics(folder), begun, rounds)
    found |= privacy_spent(sim.accountant, rounds)
    server = plain_server(server)
    network = trainer.global_model(server) if trainer.global_model else None
    return network, found


def evaluators_during_training(
    experiment: Experiment, trainer: FederatedTrainer, sim
) -> Callable:
    """Build (server, store) -> {"evaluator/metric": value} during training."""
    evaluators = experiment.task.evaluators.items()
    between = {name: of for name, of in evaluators if of.during_training}

    def evaluate_models(server, store):
        networks = trained_models(experiment, trainer, sim, server, store)
        return with_prefix(evaluate(between, networks))

    return evaluate_models


def with_prefix(found: Evaluations) -> dict[str, float]:
    """{"evaluator/metric": value}."""
    return {
        f"{name}/{metric}": value
        for name, of in found.items()
        for metric, value in of.metrics.items()
    }


def trained_models(
    experiment: Experiment, trainer: FederatedTrainer, sim, server: PyTree, store: Store
) -> TrainedModels:
    """The global model and every client's model, on the whole mesh."""
    mesh, server = experiment.mesh, plain_server(server)
    variables = of_client = of_new = None
    if trainer.global_model:
        variables = put_on_mesh(mesh, trainer.global_model(server))
    if jax.tree.leaves(store.template) or variables is None:
        parts = trainer.algorithm, server, sim.key, store, mesh
        of_client, of_new = client_models(*parts)
    return TrainedModels(
        variables, trainer.apply_global, of_client, trainer.apply, of_new
    )


@contextlib.contextmanager
def open_client_log(folder: pathlib.Path, first: int):
    """Open clients.jsonl of a stage; None except in the first process."""
    if not meshes.is_first_process():
        yield None
        return
    with contextlib.closing(
        JsonlSink(folder / "clients.jsonl", resume_step=first)
    ) as log:
        yield log
