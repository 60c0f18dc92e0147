"""Vmapped sweeps: runs that differ in seed and numbers, in one program.

Each run writes to its folder what it would have written alone, up to rounding (the
sixth digit of a loss), so that `run_experiment` can read and evaluate its finished
stages, or resume from the last checkpoint if the runs had to be separated.
"""

import contextlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.data.stream import place_examples
from fedfr_jax.federated.feature_cache import digest_leaves
from fedfr_jax.federated.model_parallel import placement
from fedfr_jax.federated.privacy.accountant import affordable_rounds
from fedfr_jax.federated.simulation import start_simulation, sweep
from fedfr_jax.runs import data_digest, loop
from fedfr_jax.runs.frozen_base import check_base
from fedfr_jax.runs.stages import (
    central_training,
    check_calls,
    open_training,
    stage_outputs,
)
from fedfr_jax.runs.sweep_results import reuse_stages, siblings_of
from fedfr_jax.runs.timing import RunTime
from fedfr_jax.runs.trackers import Logging
from fedfr_jax.types import (
    CentralTrainer,
    Dataset,
    Experiment,
    FederatedTrainer,
    PyTree,
)


class SweepMember(NamedTuple):
    """A run of the sweep."""

    experiment: Experiment
    folder: pathlib.Path
    numbers: Mapping[str, Mapping[str, float]]  # {row: {key: its number}}
    changed: str | None = None  # as of `data_digest.check`


def train_members(members: Sequence[SweepMember]) -> None:
    """Train all stages of S `shared_program` runs; federated stages in one program."""
    first = members[0].experiment
    build_trainer = check_program(first)
    check_calls(first)
    times = [RunTime(member.folder / "seconds.json") for member in members]
    ends: list[dict[str | None, PyTree]] = [{} for _ in members]
    for name, stage in first.stages.items():
        is_central = isinstance(stage.trainer, CentralTrainer)
        for member, variables in zip(members, ends, strict=True):
            if is_central:
                others = siblings_of(member.folder)
                reuse_stages(member.experiment, member.folder, others, member.changed)
            data_digest.record(member.experiment.task, [member.folder / name])
            if is_central:
                variables[name] = _train_central(member, name)
        if not is_central:
            starts = [variables.get(stage.init_from_stage) for variables in ends]
            train_stage(members, name, starts, build_trainer)
    for seconds in times:
        seconds.save(share=len(members))


def shared_program(members: Sequence[SweepMember]) -> list[list[SweepMember]]:
    """Group the members that have the same clients and examples, in order.

    A split that depends on the seed differs for every seed.
    """
    groups = []
    for member in members:
        for group in groups:
            if _is_equal(_split(group[0]), _split(member)):
                group.append(member)
                break
        else:
            groups.append([member])
    return groups


def _split(member: SweepMember) -> PyTree:
    """Clients and examples; () for a stream, which cannot be compared."""
    task = member.experiment.task
    return (task.population, task.dataset) if isinstance(task.dataset, Dataset) else ()


def _is_equal(a: PyTree, b: PyTree) -> bool:
    """Whether two trees have the same structure and values."""
    x, of_x = jax.tree.flatten(a)
    y, of_y = jax.tree.flatten(b)
    return of_x == of_y and all(map(np.array_equal, x, y))


def check_program(first: Experiment) -> Callable[..., FederatedTrainer]:
    """`with_hyperparameters` of runs that can be trained in one program.

    Raises:
      ValueError: when they cannot.
    """
    if first.with_hyperparameters is None:
        raise ValueError(
            "the task must support traced hyperparameters to train runs together, got "
            "one that does not."
        )
    stages = first.stages
    central = [k for k, x in stages.items() if isinstance(x.trainer, CentralTrainer)]
    if any(x.init_from_stage not in (None, *central) for x in stages.values()):
        raise ValueError(
            "stages must start from central stages to train runs together, got others."
        )
    if not isinstance(first.task.dataset, Dataset):
        raise ValueError(
            "the data set must be in device memory to train runs together, got a "
            "stream."
        )
    return first.with_hyperparameters


def _train_central(member: SweepMember, name: str) -> PyTree:
    """Train a central stage of one run; return its final variables."""
    experiment, folder = member.experiment, member.folder / name
    trainer = experiment.stages[name].trainer
    training = central_training(experiment, trainer, folder)
    with open_training(folder, training.end, training.first) as sinks:
        return training.run(sinks).variables


def build_sharing(trainers: Sequence[FederatedTrainer], where: str) -> Callable:
    """Build trainer -> itself, with the frozen leaves of all members' `trainers`.

    Raises:
      ValueError: for members whose frozen leaves are not the same.
    """
    constants = [x.frozen_model.frozen for x in trainers if x.frozen_model]
    if len(found := {digest_leaves(x.value) for x in constants}) > 1:
        raise ValueError(
            f"{where}: runs must have the same frozen leaves to train together, got "
            f"those of {len(found)} networks. Set pretrain.init, or remove --vmap."
        )

    def share(trainer: FederatedTrainer) -> FederatedTrainer:
        if trainer.frozen_model:
            trainer.frozen_model.frozen.stand_for(constants[0])
        return trainer

    return share


def train_stage(
    members: Sequence[SweepMember],
    name: str,
    starts: Sequence[PyTree | None],
    build_trainer: Callable[..., FederatedTrainer],
) -> None:
    """Train a federated stage of all members up to their last common round."""
    first, mesh = members[0].experiment, members[0].experiment.mesh
    federation, population = first.federation, first.task.population
    all_trainers = [member.experiment.stages[name].trainer for member in members]
    trainers = [x for x in all_trainers if isinstance(x, FederatedTrainer)]
    parts = zip(trainers, starts, strict=True)
    begun = [trainer.init_variables(variables) for trainer, variables in parts]
    share_base = build_sharing(trainers, f"config.methods.{name}")
    runs = sweep(
        lambda numbers: share_base(build_trainer(name, numbers)).algorithm,
        first.batching,
        place_examples(first.task.dataset, mesh),
        population,
        federation.rounds_of(trainers[0], population.num_clients, first.seed),
        hypers=[dict(member.numbers.get(name, {})) for member in members],
        seeds=[member.experiment.seed for member in members],
        mesh=mesh,
    )
    with contextlib.ExitStack() as stack:
        resumed = []
        parts = zip(members, runs.sims, trainers, begun, strict=True)
        for member, sim, trainer, variables in parts:
            server, folder = start_simulation(sim, variables), member.folder / name
            resumed.append(loop.resume(sim, server, folder))
            stack.callback(resumed[-1].checkpointer.close)
            check_base(trainer, folder, is_new=not resumed[-1].first)
        first_round = resumed[0].first
        if len(rounds := {run.first for run in resumed}) > 1:
            raise ValueError(
                "runs must all be at the same round to train together, got "
                f"{sorted(rounds)}."
            )
        sims = tuple(run.sim for run in resumed)
        end = min(affordable_rounds(x.accountant, federation.rounds) for x in sims)
        if first_round >= end:
            return
        outputs = []
        for member, trainer, run in zip(members, trainers, resumed, strict=True):
            sinks = open_training(
                member.folder / name,
                federation.rounds,
                first_round,
                title=f"{name}, together",
                # One member shows the progress of all.
                logging=Logging(view="quiet" if outputs else "auto"),
                clients_every=federation.log_clients_every,
            )
            sinks = stack.enter_context(sinks)
            outputs.append(stage_outputs(member.experiment, trainer, run, sinks))
        servers = [run.server for run in resumed]
        servers = jax.tree.map(lambda *x: jnp.stack(x), *servers)
        servers = jax.device_put(servers, placement(mesh, servers, None))
        loop.train(runs._replace(sims=sims), servers, outputs, first_round, end)
