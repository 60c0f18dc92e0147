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
from fedfr_jax.json_files import read_json
from fedfr_jax.metric_names import NOT_PRIVATE
from fedfr_jax.runs import data_digest, loop, report
from fedfr_jax.runs.central_stage import train_central, training_flops
from fedfr_jax.runs.evaluation_record import (
    with_prefix,
    write_environment,
    write_record,
)
from fedfr_jax.runs.goodput import goodput, measured_time
from fedfr_jax.runs.lifecycle import DEFAULT_LIFECYCLE, Lifecycle
from fedfr_jax.runs.report.rounds import SIMULATED
from fedfr_jax.runs.sinks import JsonlSink, read_jsonl, write_summary
from fedfr_jax.runs.stage_model import add_calibration, forget_model, write_model
from fedfr_jax.runs.stage_setup import (
    StageState,
    check_calls,
    final_simulation,
    read_end,
    start_stage,
)
from fedfr_jax.runs.terminal import StageSizes
from fedfr_jax.runs.trackers import DEFAULT_LOGGING, Logging, open_sinks, show_at_end
from fedfr_jax.runs.workdir import ElapsedTime
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
    evaluations: Mapping[str, Evaluation],
    evaluators: Mapping[str, Evaluator],
    rows: Sequence[Mapping[str, Any]],
    state: StageState,
    rounds: int,
) -> dict[str, Evaluation]:
    """Add the costs of a target and the evaluation "communication" to evaluations.

    Args:
      rows: lines of the stage's metrics.jsonl; if some are missing, rounds to a target
        are left out, with a message.
      rounds: of the whole stage.
    """
    result = dict(evaluations)
    if missing := sorted({*range(1, rounds + 1)} - {row["round"] for row in rows}):
        first = ", ".join(map(str, missing[:3]))
        show(
            f"metrics.jsonl has lost {len(missing)} rounds ({first}...): the rounds "
            "to a target are left out."
        )
    else:
        for name, evaluation in evaluations.items():
            costs = cost_of_target(name, evaluators[name], rows, evaluation)
            metrics = {**evaluation.metrics, **costs}
            result[name] = evaluation._replace(metrics=metrics)
    sent = communication(state, rounds)
    return {**result, "communication": Evaluation(sent)} if sent else result


def cost_of_target(
    name: str, evaluator: Evaluator, rows: Sequence[Mapping], evaluation: Evaluation
) -> dict[str, float | None]:
    """{"rounds_to_TARGET": first round, from 1, whose evaluation reached the target}.

    Where clients take time there is "simulated_seconds_to_TARGET" too, the time at the
    end of that round. None if no round reached it; {} if the evaluator gave no such
    metric.
    """
    costs = {}
    is_timed = any(SIMULATED in row for row in rows)
    for metric, target in evaluator.targets.items():
        if metric not in evaluation.metrics:
            continue
        values = ((row, row.get(f"{name}/{metric}")) for row in rows)
        reached = (row for row, x in values if x is not None and x >= target)
        first = next(reached, {})
        costs[f"rounds_to_{target:g}"] = first.get("round")
        if is_timed:
            costs[f"{SIMULATED}_to_{target:g}"] = first.get(SIMULATED)
    return costs


def communication(state: StageState, rounds: int) -> dict[str, float]:
    """Megabytes per client and round, uploaded and downloaded, and in total."""
    sim = state.sim
    sizes = count_communication(sim, state.server, state.store.template)
    if sizes is None:
        return {}
    senders = num_trained(sim.stragglers, sim.cohort_size)  # the dropped only receive
    total = (sizes.up * senders + sizes.down * sim.num_places) * rounds
    megabytes = {"upload_mb": sizes.up, "download_mb": sizes.down, "total_mb": total}
    return {name: size / MEGABYTE for name, size in megabytes.items()}


def with_spent(
    evaluations: Mapping[str, Evaluation],
    evaluators: Mapping[str, Evaluator],
    folder: pathlib.Path,
    state: StageState,
    max_rounds: int,
) -> dict[str, Evaluation]:
    """Add what a stage's rounds cost: communication, and privacy.

    Args:
      max_rounds: of the config; fewer are trained where the privacy budget ends.
    """
    accountant, rounds = state.sim.accountant, max_rounds
    if accountant:
        rounds = accountant.rounds_within_budget(max_rounds)
    rows = read_metrics(folder)
    result = with_costs(evaluations, evaluators, rows, state, rounds)
    return result | privacy_spent(accountant, rounds)


def is_private(accountant: Accountant | None) -> bool:
    """Whether rounds are private: clipping without noise is not."""
    return accountant is not None and accountant.mechanism.noise_multiplier > 0


def privacy_spent(accountant: Accountant | None, rounds: int) -> dict[str, Evaluation]:
    """{"privacy": epsilon at delta after all rounds} of a private method, else {}."""
    if not is_private(accountant):
        return {}
    epsilon, delta = accountant.epsilon_bound(rounds), accountant.mechanism.delta
    return {"privacy": Evaluation({"epsilon": epsilon, "delta": delta})}


def note_privacy(accountant: Accountant | None, folder: pathlib.Path) -> None:
    """Write privacy.json of a private method: what in its folder is private."""
    if is_private(accountant) and meshes.is_first_process():
        neighbors = {"neighbors": accountant.mechanism.neighbors}
        write_summary(folder / PRIVACY_FILE, neighbors | {**PRIVACY_NOTE})


def neighbors_of(folders: Sequence[pathlib.Path]) -> dict[str, dict[str, str]]:
    """{"neighbors": {stage: of what epsilon is}} of the private stages, else {}."""
    paths = [x / PRIVACY_FILE for x in folders if (x / PRIVACY_FILE).is_file()]
    found = {path.parent.name: read_json(path).get("neighbors") for path in paths}
    return {"neighbors": found} if found else {}


PRIVACY_FILE = "privacy.json"
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


def show(text_or_table) -> None:
    """Print text, or a table as wide as needed, in the first process."""
    if not meshes.is_first_process():
        return
    if isinstance(text_or_table, str):
        print(printable(text_or_table, keep="\n"), flush=True)
        return
    console = rich.console.Console()
    wide = rich.console.Console(width=10_000)
    width = max(console.width, wide.measure(text_or_table).maximum)
    rich.console.Console(width=width).print(text_or_table)


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
        evaluations = run_stages(experiment, workdir, clock, logging, lifecycle)
    seconds = clock.note(times.seconds)
    summary = {"methods": metrics_by_stage(evaluations), "seconds": seconds}
    summary |= goodput(times.seconds, seconds)
    summary |= neighbors_of([workdir / name for name in evaluations])
    write_summary(workdir / "summary.json", summary)
    show(report.result_table(summary))  # before the plots, which may lack a package
    rows = {name: read_metrics(workdir / name) for name in evaluations}
    data_report = experiment.task.data_report
    paths = report.draw(evaluations, rows, workdir, data_report=data_report, say=show)
    images = [path for path in paths if path.suffix == ".png"]
    for path in [workdir / "summary.json", *images]:
        show(str(path))
    lifecycle.saved()
    return summary


def read_metrics(folder: pathlib.Path) -> list[dict]:
    """Lines of a stage's metrics.jsonl; [] if it has none yet."""
    try:
        return read_jsonl(folder / "metrics.jsonl")
    except FileNotFoundError:
        return []


def metrics_by_stage(evaluations: Mapping[str, Evaluations]) -> dict:
    """{stage: {evaluator: {metric: value}}}."""
    return {
        stage: {name: dict(x.metrics) for name, x in of_stage.items()}
        for stage, of_stage in evaluations.items()
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
    ends, evaluations = {}, {}
    folders = [workdir / name for name in experiment.stages]
    data_digest.check(experiment.task, folders)
    data_digest.record(experiment.task, folders)
    start_stages = {stage.init_from_stage for stage in experiment.stages.values()}
    for name, stage in experiment.stages.items():
        is_central = isinstance(stage.trainer, CentralTrainer)
        run = run_central if is_central else run_federated
        start = ends.get(stage.init_from_stage)
        end, evaluations[name] = run(
            experiment, stage.trainer, start, workdir / name, logging, lifecycle
        )
        write_record(workdir, name, evaluations[name])
        if name in start_stages:
            ends[name] = end
        if clock:
            clock.note(lifecycle.times and lifecycle.times.seconds)
        lifecycle.saved()
    return evaluations


def run_central(
    experiment: Experiment,
    trainer: CentralTrainer,
    start: PyTree,
    folder: pathlib.Path,
    logging: Logging = DEFAULT_LOGGING,
    lifecycle: Lifecycle = DEFAULT_LIFECYCLE,
) -> tuple[PyTree, Evaluations]:
    """Train or read a central stage: (its variables, evaluations)."""
    del start  # a central stage takes its start from its trainer
    mesh, seed, end = experiment.mesh, experiment.seed, trainer.settings.epochs
    is_new = len(read_metrics(folder)) < end
    variables = train_central(
        trainer, mesh, folder, seed=seed, logging=logging, lifecycle=lifecycle
    )
    apply, network = trainer.apply_global, trainer.global_model(variables)
    networks = TrainedModels(network, apply, None, apply)
    with lifecycle.timed("evaluation"):
        evaluations = save_and_evaluate(experiment, trainer, networks, folder)
    if is_new:
        show_at_end(folder, end - 1, with_prefix(evaluations), logging)
    return variables, evaluations


def save_and_evaluate(
    experiment: Experiment,
    trainer: FederatedTrainer | CentralTrainer,
    networks: TrainedModels,
    folder: pathlib.Path,
) -> dict[str, Evaluation]:
    """Save a stage's model in its folder, and evaluate it."""
    write_model(folder, experiment.task, trainer, networks.variables)
    evaluations = evaluate(experiment.task.evaluators, networks)
    add_calibration(folder, evaluations)
    return evaluations


def evaluate(
    evaluators: Mapping[str, Evaluator], networks: TrainedModels
) -> dict[str, Evaluation]:
    """Run every evaluator on a stage's models."""
    with jax.profiler.TraceAnnotation("evaluate"):
        return {name: x.evaluate(networks) for name, x in evaluators.items()}


def run_federated(
    experiment: Experiment,
    trainer: FederatedTrainer,
    start: PyTree | None,
    folder: pathlib.Path,
    logging: Logging = DEFAULT_LOGGING,
    lifecycle: Lifecycle = DEFAULT_LIFECYCLE,
) -> tuple[PyTree, Evaluations]:
    """Train a method, or read it if finished: (global model, evaluations).

    Args:
      start: variables of the stage that this one starts from, if any.
    """
    state = start_stage(
        experiment, trainer, start, folder, is_mirrored=lifecycle.is_mirrored
    )
    sim, evaluators = state.sim, experiment.task.evaluators
    rounds = affordable_rounds(sim.accountant, experiment.federation.rounds)
    end = read_end(trainer, rounds, folder)
    is_new = state.first < end
    note_privacy(sim.accountant, folder)
    if is_new:
        forget_model(folder)
    with _open_outputs(
        experiment, trainer, state, folder, end, logging, lifecycle
    ) as outputs:
        server = _train_rounds(state, outputs, rounds)
        state.store.keep_newest()  # the last checkpoint is whole
        with lifecycle.timed("evaluation"):
            models = trained_models(experiment, trainer, sim, server, state.store)
            evaluations = save_and_evaluate(experiment, trainer, models, folder)
    state.checkpointer.close()
    numbers = with_prefix(
        {k: x for k, x in evaluations.items() if not evaluators[k].during_training}
    )  # the others have been logged with the last round
    if is_new:
        show_at_end(folder, end - 1, numbers, logging)
    evaluations = with_spent(evaluations, evaluators, folder, state, rounds)
    server = plain_server(server)
    network = trainer.global_model(server) if trainer.global_model else None
    return network, evaluations


@contextlib.contextmanager
def _open_outputs(experiment, trainer, state, folder, end, logging, lifecycle):
    """Open the outputs of a method's rounds, the last of which is `end`."""
    sim, first = state.sim, state.first
    sizes = StageSizes(sim.cohort_size, sim.batching.batch_size)
    with (
        open_client_log(folder, first) as clients,
        open_sinks(
            folder, folder.name, end, first, logging=logging, sizes=sizes
        ) as sinks,
    ):
        yield loop.RunOutputs(
            state.store,
            state.checkpointer,
            evaluators_during_training(experiment, trainer, sim),
            sinks,
            clients,
            loop.intervals(experiment.federation),
            lifecycle,
            training_flops(trainer),
            sim.accountant,
        )


def _train_rounds(state: StageState, outputs: loop.RunOutputs, rounds: int) -> PyTree:
    """Train the rounds to come, and a final adaptation; return the last server."""
    first, adaptation = state.first, state.last_round
    adapted = adaptation and final_simulation(state.sim, adaptation, rounds)
    server = loop.train(state.sim, state.server, outputs, first, rounds)
    if adapted:
        outputs = outputs._replace(accountant=adapted.accountant)
        server = loop.train(adapted, server, outputs, max(first, rounds), rounds + 1)
    return server


def evaluators_during_training(
    experiment: Experiment, trainer: FederatedTrainer, sim
) -> Callable:
    """Build (server, store) -> {"evaluator/metric": value} during training."""
    evaluators = experiment.task.evaluators.items()
    during_training = {name: x for name, x in evaluators if x.during_training}

    def evaluate_models(server, store):
        networks = trained_models(experiment, trainer, sim, server, store)
        return with_prefix(evaluate(during_training, networks))

    return evaluate_models


def trained_models(
    experiment: Experiment, trainer: FederatedTrainer, sim, server: PyTree, store: Store
) -> TrainedModels:
    """The global model and every client's model, on the whole mesh."""
    mesh, server = experiment.mesh, plain_server(server)
    variables = of_client = of_new = None
    if trainer.global_model:
        variables = put_on_mesh(mesh, trainer.global_model(server))
    if jax.tree.leaves(store.template) or variables is None:
        of_client, of_new = client_models(
            trainer.algorithm, server, sim.key, store, mesh
        )
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
