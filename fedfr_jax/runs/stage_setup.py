"""Federated stage setup: new or resumed."""

import pathlib
from typing import NamedTuple

from fedfr_jax.data.stream import Stream, place_examples
from fedfr_jax.federated.aggregation.contract import on_inner
from fedfr_jax.federated.many_rounds import check_rounds_per_call
from fedfr_jax.federated.privacy.accountant import continued, ended
from fedfr_jax.federated.privacy.ledger import Ledger
from fedfr_jax.federated.simulation import (
    Simulation,
    build_simulation,
    start_simulation,
    with_counted_work,
)
from fedfr_jax.federated.store import Store
from fedfr_jax.runs import loop
from fedfr_jax.runs.checkpoint import Checkpointer, stage_accountant
from fedfr_jax.schema import naming
from fedfr_jax.types import (
    CentralTrainer,
    Experiment,
    FederatedTrainer,
    FinalAdaptation,
    PyTree,
)


class StageState(NamedTuple):
    """A federated stage, ready to be trained or finished."""

    sim: Simulation
    last_round: FinalAdaptation | None
    server: PyTree
    store: Store
    checkpointer: Checkpointer
    first: int  # the round to train next


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
                    federation.build_systems(task.population.num_clients),
                    mesh=experiment.mesh,
                    is_streamed=isinstance(task.dataset, Stream),
                )


def start_stage(
    experiment: Experiment,
    trainer: FederatedTrainer,
    variables: PyTree,
    folder,
    *,
    is_read_only: bool = False,
    is_mirrored: bool = False,
) -> StageState:
    """Initialize a stage from `variables` or resume it.

    Args:
      is_read_only: the stage has ended; nothing is written to its folder.
      is_mirrored: the folder is in this process's copy of a run in a bucket.
    """
    table = place_examples(experiment.task.dataset, experiment.mesh)
    sim = build_stage_simulation(experiment, trainer, table)
    server = start_simulation(sim, trainer.init_variables(variables))
    server, store, checkpointer, first, past = loop.resume(
        sim, server, folder, is_read_only=is_read_only, is_mirrored=is_mirrored
    )
    return StageState(
        sim=with_counted_work(after_rounds(sim, past), server),
        last_round=trainer.final_adaptation,
        server=server,
        store=store,
        checkpointer=checkpointer,
        first=first,
    )


def build_stage_simulation(
    experiment: Experiment, trainer: FederatedTrainer, table
) -> Simulation:
    """Build the simulation of a trainer on the experiment's clients."""
    return build_simulation(
        trainer.algorithm,
        experiment.batching,
        table,
        experiment.task.population,
        mesh=experiment.mesh,
        clients_per_device=experiment.federation.clients_per_device,
        seed=experiment.seed,
        **experiment.federation.options_of(
            trainer, experiment.task.population.num_clients
        ),
    )


def after_rounds(sim: Simulation, past: Ledger) -> Simulation:
    """A simulation whose accountant knows what was spent before."""
    return sim._replace(accountant=continued(sim.accountant, past))


def final_simulation(sim: Simulation, last: FinalAdaptation, rounds: int) -> Simulation:
    """Build the simulation of the final adaptation: all clients, another algorithm.

    Its clients send nothing, so that it spends no privacy after the `rounds` before.
    """
    canonical = {"reproducible_sum": True, "num_partial_sums": sim.num_partial_sums}
    has_world = sim.algorithm is not sim.inner_algorithm  # its server has one
    adapting = build_simulation(
        on_inner(last.algorithm) if has_world else last.algorithm,
        sim.batching,
        sim.device_data,
        sim.population,
        mesh=sim.mesh,
        local_epochs=last.epochs,
        clients_per_device=sim.clients_per_device,
        seed=sim.seed,
        **(canonical if sim.num_partial_sums else {}),
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
