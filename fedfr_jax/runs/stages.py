"""Stages: start or resume, train, save and evaluate their models, read them again."""

import contextlib
import pathlib
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np

from fedfr_jax import manifest
from fedfr_jax import mesh as meshes
from fedfr_jax.data.stream import Stream, place_examples
from fedfr_jax.federated.aggregation.contract import on_inner
from fedfr_jax.federated.inference import client_models
from fedfr_jax.federated.model_parallel import put_on_mesh
from fedfr_jax.federated.parameter_packing import unpack
from fedfr_jax.federated.participation import with_counted_work
from fedfr_jax.federated.privacy.accountant import (
    affordable_rounds,
    ended,
)
from fedfr_jax.federated.programs import size_of_call
from fedfr_jax.federated.rounds import check_rounds_per_call
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import build_simulation, start_simulation
from fedfr_jax.federated.state import Simulation
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.systems.state import plain_server
from fedfr_jax.models.peft_folder import save_adapter
from fedfr_jax.models.saved_model import RECORD, WEIGHTS, save_model
from fedfr_jax.runs import data_digest, loop
from fedfr_jax.runs.central_stage import read_central, train_central, training_flops
from fedfr_jax.runs.checkpoint import (
    check_end,
    checkpoint_numbers,
    is_trained,
    stage_accountant,
)
from fedfr_jax.runs.costs import Evaluations, note_privacy, with_spent
from fedfr_jax.runs.evaluation_record import with_prefix
from fedfr_jax.runs.frozen_base import check_base, with_base, with_features
from fedfr_jax.runs.loop import DEFAULT_LIFECYCLE, Lifecycle, StageState
from fedfr_jax.runs.sinks import Sink
from fedfr_jax.runs.trackers import open_sinks
from fedfr_jax.schema import check_choice, naming
from fedfr_jax.types import (
    CentralTrainer,
    Evaluation,
    Evaluator,
    Experiment,
    FederatedTrainer,
    FinalAdaptation,
    PyTree,
    Task,
    TrainedModels,
)
from fedfr_jax.version import library_version

CALIBRATION = "calibration"  # of model.json
ADAPTER = "adapter"  # folder of a stage: its LoRA alone, for PEFT
ROOT = pathlib.Path(__file__).parents[2]


class EndedStage(NamedTuple):
    """A stage at its end."""

    models: TrainedModels
    variables: PyTree | None  # for stages that start from this one
    state: StageState | None  # of a federated stage
    # Of these models, if their last round has just been trained
    evaluations: Mapping[str, Evaluation] = MappingProxyType({})


# Federated stages: new or resumed.


def check_calls(experiment: Experiment) -> None:
    """Raise ValueError for stages whose rounds cannot be run in one call."""
    federation, task = experiment.federation, experiment.task
    for name, stage in experiment.stages.items():
        if isinstance(stage.trainer, FederatedTrainer):
            with naming(f"config.methods.{name}"):
                check_rounds_per_call(
                    "federation.rounds_per_call",
                    federation.rounds_per_call,
                    stage.trainer.algorithm,
                    federation.systems.build(task.population.num_clients),
                    experiment.mesh,
                )
                longest = loop.longest_call(federation, federation.rounds)
                if longest > 1 and isinstance(task.dataset, Stream):
                    parts = experiment, stage.trainer, task.dataset
                    size_of_call(build_stage_simulation(*parts), longest)


def start_stage(
    experiment: Experiment,
    trainer: FederatedTrainer,
    variables: PyTree,
    folder,
    *,
    is_read_only: bool = False,
    **options,
) -> StageState:
    """Initialize a stage from `variables` or resume it.

    Args:
      is_read_only, options: as of `loop.resume`.
    """
    batching, rounds = experiment.batching, experiment.federation.rounds
    dataset = place_examples(experiment.task.dataset, experiment.mesh)
    start = trainer.init_variables(variables)
    if is_trained(folder):
        check_base(trainer, folder, is_new=False)
    done = max(checkpoint_numbers(folder), default=0)
    if not is_read_only and done < read_end(trainer, rounds, folder):
        dataset, batching = with_features(experiment, trainer, dataset, folder)
    sim = build_stage_simulation(experiment, trainer, dataset, batching)
    server = start_simulation(sim, start)
    state = loop.resume(sim, server, folder, is_read_only=is_read_only, **options)
    if not state.first and not is_read_only:
        check_base(trainer, folder, is_new=True)
    if (text := sim.idle_lanes) and meshes.is_first_process():
        print(f"{folder.name}: {text}", flush=True)
    return state._replace(sim=with_counted_work(state.sim, state.server))


def build_stage_simulation(
    experiment: Experiment, trainer: FederatedTrainer, dataset, batching=None
) -> Simulation:
    """Build the simulation of a trainer on the experiment's clients.

    Args:
      batching: of the data set; None is the experiment's.
    """
    federation, population = experiment.federation, experiment.task.population
    return build_simulation(
        trainer.algorithm,
        batching or experiment.batching,
        dataset,
        population,
        federation.rounds_of(trainer, population.num_clients, experiment.seed),
        mesh=experiment.mesh,
    )


def final_simulation(sim: Simulation, last: FinalAdaptation, rounds: int) -> Simulation:
    """Build the simulation of the final adaptation: all clients, another algorithm.

    Its clients send nothing, so that it spends no privacy after the `rounds` before.
    """
    has_state = sim.algorithm is not sim.inner_algorithm  # its server has one
    adapting = build_simulation(
        on_inner(last.algorithm) if has_state else last.algorithm,
        sim.batching,
        sim.device_data,
        sim.population,
        Settings(
            local_epochs=last.epochs,
            clients_per_device=sim.settings.clients_per_device,
            seed=sim.settings.seed,
            reproducible_sum=sim.settings.reproducible_sum,
            num_partial_sums=sim.settings.num_partial_sums,
        ),
        mesh=sim.mesh,
    )
    return adapting._replace(accountant=ended(sim.accountant, rounds))


def read_end(
    trainer: FederatedTrainer | CentralTrainer, rounds: int, folder: pathlib.Path
) -> int:
    """Number of the last checkpoint of the stage in `folder`."""
    if isinstance(trainer, CentralTrainer):
        return trainer.settings.epochs
    if accountant := stage_accountant(trainer, folder):
        rounds = accountant.rounds_within_budget(rounds)
    return rounds + (trainer.final_adaptation is not None)


# Training.


class StageTraining(NamedTuple):
    """A stage to be trained from the round or epoch `first` to its `end`."""

    first: int
    end: int
    run: Callable[[list[Sink]], EndedStage]  # trains, or reads it if finished


def run_stage(
    experiment: Experiment,
    trainer: FederatedTrainer | CentralTrainer,
    start: PyTree | None,
    folder: pathlib.Path,
    lifecycle: Lifecycle = DEFAULT_LIFECYCLE,
) -> tuple[PyTree, Evaluations]:
    """Train a stage, or read it if finished: (global model, evaluations).

    Args:
      start: variables of the stage that this one starts from, if any.
    """
    is_central = isinstance(trainer, CentralTrainer)
    if is_central:
        training = central_training(experiment, trainer, folder, lifecycle)
    else:
        training = _federated_training(experiment, trainer, start, folder, lifecycle)
    with open_training(
        folder,
        training.end,
        training.first,
        logging=lifecycle.logging,
        clients_every=None if is_central else experiment.federation.log_clients_every,
    ) as sinks:
        ended = training.run(sinks)
        with lifecycle.timed("evaluation"):
            evaluations = save_and_evaluate(experiment, trainer, ended, folder)
        logged = () if is_central else _during_training(experiment)
        late = {name: x for name, x in evaluations.items() if name not in logged}
        for sink in sinks if late else ():
            sink.result(training.end - 1, with_prefix(late))
    return ended.variables, with_spent(experiment, evaluations, folder, ended.state)


def central_training(
    experiment: Experiment, trainer, folder, lifecycle: Lifecycle = DEFAULT_LIFECYCLE
) -> StageTraining:
    """A central stage to be trained."""

    def run(sinks):
        variables = train_central(
            trainer,
            experiment.mesh,
            folder,
            seed=experiment.seed,
            sinks=sinks,
            lifecycle=lifecycle,
        )
        return _ended_central(trainer, variables)

    first = max(checkpoint_numbers(folder), default=0)
    return StageTraining(first, trainer.settings.epochs, run)


def _federated_training(experiment, trainer, start, folder, lifecycle) -> StageTraining:
    state = start_stage(
        experiment,
        trainer,
        start,
        folder,
        is_mirrored=lifecycle.is_mirrored,
        objects=lifecycle.objects,
    )
    rounds = affordable_rounds(state.sim.accountant, experiment.federation.rounds)
    note_privacy(state.sim.accountant, folder)
    evaluations: dict[str, Evaluation] = {}

    def run(sinks):
        outputs = stage_outputs(experiment, trainer, state, sinks)._replace(
            lifecycle=lifecycle,
            flops_per_image=training_flops(trainer),
            last_evaluations=evaluations,
        )
        server = _train_rounds(trainer, outputs, rounds)
        state.checkpointer.close()
        state.store.keep_newest()  # the last checkpoint is whole
        ended = _ended_federated(experiment, trainer, state._replace(server=server))
        return ended._replace(evaluations=evaluations)

    return StageTraining(state.first, read_end(trainer, rounds, folder), run)


def _during_training(experiment: Experiment) -> dict[str, Evaluator]:
    """Evaluators of rounds, and not only of the trained stage."""
    evaluators = experiment.task.evaluators.items()
    return {name: x for name, x in evaluators if x.during_training}


@contextlib.contextmanager
def open_training(
    folder: pathlib.Path, end: int, first: int, **options
) -> Iterator[list[Sink]]:
    """Open the sinks of a stage with rounds to come; none of a finished one.

    Args:
      options: of `open_sinks`.
    """
    if first >= end:
        yield []
        return
    forget_model(folder)
    with open_sinks(folder, end, first, **options) as sinks:
        yield sinks


def stage_outputs(
    experiment: Experiment, trainer: FederatedTrainer, state: StageState, sinks
) -> loop.RunOutputs:
    """Outputs of a method's rounds."""
    evaluators = _during_training(experiment)

    def evaluate_models(server, store):
        models = trained_models(experiment, trainer, state.sim, server, store)
        return evaluate(evaluators, models)

    return loop.RunOutputs(state, evaluate_models, experiment.federation, sinks)


def _train_rounds(trainer, outputs: loop.RunOutputs, rounds: int) -> PyTree:
    """Train the rounds to come, and a final adaptation; return the last server."""
    state, adaptation = outputs.stage, trainer.final_adaptation
    sim = adaptation and final_simulation(state.sim, adaptation, rounds)
    server = loop.train(state.sim.runs, state.server, [outputs], state.first, rounds)
    if sim:
        first, adapted = max(state.first, rounds), state._replace(sim=sim)
        outputs = outputs._replace(stage=adapted)
        server = loop.train(sim.runs, server, [outputs], first, rounds + 1)
    return server


# Models of a stage at its end.


def _ended_central(trainer: CentralTrainer, variables: PyTree) -> EndedStage:
    network, apply = trainer.global_model(variables), trainer.apply_global
    return EndedStage(TrainedModels(network, apply, None, apply), variables, None)


def _ended_federated(experiment, trainer, state: StageState) -> EndedStage:
    server = plain_server(state.server)
    models = trained_models(experiment, trainer, state.sim, server, state.store)
    variables = trainer.global_model(server) if trainer.global_model else None
    return EndedStage(models, variables, state)


def trained_models(
    experiment: Experiment, trainer: FederatedTrainer, sim, server: PyTree, store: Store
) -> TrainedModels:
    """The global model and every client's model, on the whole mesh."""
    mesh, server = experiment.mesh, plain_server(server)
    variables = of_client = of_new = None
    if trainer.global_model:
        variables = put_on_mesh(mesh, trainer.global_model(server))
    if jax.tree.leaves(store.template) or variables is None:
        models = client_models(trainer.algorithm, server, sim.key, store, mesh)
        of_client, of_new = (with_base(trainer, mesh, x) for x in models)
    return TrainedModels(
        variables, trainer.apply_global, of_client, trainer.apply, of_new
    )


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
    return read_stage(experiment, name, workdir).models


def read_stage(experiment: Experiment, name: str, workdir: pathlib.Path) -> EndedStage:
    """Read a finished stage."""
    stage, folder = experiment.stages[name], workdir / name
    trainer, before = stage.trainer, stage.init_from_stage
    check_end(folder, read_end(trainer, experiment.federation.rounds, folder))
    if isinstance(trainer, CentralTrainer):
        state = read_central(trainer, experiment.mesh, folder, seed=experiment.seed)
        return _ended_central(trainer, state)
    start = read_stage(experiment, before, workdir).variables if before else None
    state = start_stage(experiment, trainer, start, folder, is_read_only=True)
    state.checkpointer.close()
    return _ended_federated(experiment, trainer, state)


def save_and_evaluate(
    experiment: Experiment,
    trainer: FederatedTrainer | CentralTrainer,
    ended: EndedStage,
    folder: pathlib.Path,
) -> dict[str, Evaluation]:
    """Save a stage's model in its folder, see `models.saved_model`, and evaluate it.

    In this order, so that a failed evaluation costs no model; the ROC on unseen
    identities is added afterwards, for thresholds.
    """
    _write_model(folder, experiment.task, trainer, ended.models.variables)
    _write_adapter(folder, trainer, ended.state)
    evaluators, found = experiment.task.evaluators, ended.evaluations
    late = {name: x for name, x in evaluators.items() if name not in found}
    evaluations = {**found, **evaluate(late, ended.models)}
    evaluations = {name: evaluations[name] for name in evaluators}  # in their order
    roc = evaluations.get("generic", Evaluation()).curves.get("roc")
    if roc is not None and meshes.is_first_process() and (folder / RECORD).exists():
        record = manifest.read_object(folder / RECORD)
        if CALIBRATION not in record:
            record[CALIBRATION] = roc.as_lists()
            manifest.write_object(folder / RECORD, record)
    return evaluations


def evaluate(
    evaluators: Mapping[str, Evaluator], models: TrainedModels
) -> dict[str, Evaluation]:
    """Run every evaluator on a stage's models."""
    with jax.profiler.TraceAnnotation("evaluate"):
        return {name: _evaluated(name, x, models) for name, x in evaluators.items()}


def _evaluated(name: str, evaluator: Evaluator, models: TrainedModels) -> Evaluation:
    """Evaluate models by an evaluator, which may be of a user's own task."""
    result = evaluator.evaluate(models)
    if not isinstance(result, Evaluation):
        kind = type(result).__name__
        raise ValueError(f"evaluator {name} must return an Evaluation, got a {kind}.")
    for metric, value in result.metrics.items():
        if np.ndim(value):
            raise ValueError(
                f"{metric} of evaluator {name} must be a number, got {value}."
            )
    return result


def _write_model(
    folder: pathlib.Path,
    task: Task,
    trainer: FederatedTrainer | CentralTrainer,
    variables: PyTree | None,
) -> None:
    """Write the model of the stage in `folder`, unless it exists.

    Args:
      variables: of the global model; None if there is none.
    """
    variables = meshes.fetch(unpack(variables))  # by every process
    if not meshes.is_first_process() or (folder / RECORD).exists():
        return
    model, preprocessing = trainer.model_config, task.preprocessing
    record = {
        "task": task.name,
        "method": folder.name,
        "model": model,
        "image_shape": task.dataset.input_shape,
        "output": "features" if task.is_of_features else None,
        "classes": list(task.classes) or None,
        "preprocessing": preprocessing and preprocessing._asdict(),
        "version": library_version(),
        "commit": _commit(),
    }
    save_model(folder, variables, record)


def _write_adapter(folder: pathlib.Path, trainer, state: StageState | None) -> None:
    """Write the LoRA of the stage in `folder`, if it has one that is everybody's."""
    model = trainer.frozen_model if isinstance(trainer, FederatedTrainer) else None
    if state is None or model is None or trainer.global_model is None:
        return
    if model.adapter is None or not model.adapter.rank:
        return
    server = plain_server(state.server)
    variables = meshes.fetch(trainer.algorithm.global_model(server))
    if not meshes.is_first_process():
        return
    try:
        save_adapter(folder / ADAPTER, model, variables)
    except ValueError as error:  # of a head that PEFT has no names for
        print(f"{folder.name}: no folder for PEFT: {error}", flush=True)


def forget_model(folder: pathlib.Path) -> None:
    """Remove model.json and the LoRA of a stage before it trains: they are old."""
    if meshes.is_first_process():
        shutil.rmtree(folder / ADAPTER, ignore_errors=True)
        manifest.cover(folder, {WEIGHTS: None, RECORD: None})
        (folder / RECORD).unlink(missing_ok=True)


def _commit() -> str | None:
    """Git commit of the checkout that has this library; None elsewhere."""
    if not (ROOT / ".git").exists():
        return None
    try:
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:  # no git
        return None
    return done.stdout.strip() or None
