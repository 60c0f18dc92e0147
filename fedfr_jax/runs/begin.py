"""A federated stage on its way into the loop: fresh, resumed, as fast as it gets on
this machine."""

from typing import NamedTuple

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.model_axis import onto
from fedfr_jax.federated.settings import AUTO
from fedfr_jax.federated.simulation import Simulation, simulation, start
from fedfr_jax.federated.store import Store
from fedfr_jax.runs import loop
from fedfr_jax.runs.checkpoint import Checkpointer
from fedfr_jax.runs.tuning import Setting, tune
from fedfr_jax.stream import placed
from fedfr_jax.types import Central, Experiment, Federated, LastRound, PyTree


class Begun(NamedTuple):
    """A stage ready to be trained, or at its end."""

    sim: Simulation
    last_round: LastRound | None
    server: PyTree
    store: Store
    checkpointer: Checkpointer
    first: int  # the round to play next


def begin(
    experiment: Experiment,
    trainer: Federated,
    variables: PyTree,
    folder,
    *,
    is_read_only: bool = False,
) -> Begun:
    """Start from `variables` or go on where the folder stopped, as fast as measured.

    Args:
      is_read_only: the stage has ended; its folder stays as it is.
    """
    federation, mesh = experiment.federation, experiment.mesh
    table = placed(experiment.task.dataset, mesh)
    setting = Setting(lanes=federation.first_lanes)
    trainers = {setting.implementation: trainer, **trainer.implementations}
    make = lambda setting: simulation_of(
        experiment, trainers[setting.implementation], table, setting
    )
    sim = make(setting)
    server = start(sim, trainer.start(variables))
    server, store, checkpointer, first = loop.resume(
        sim, server, folder, is_read_only=is_read_only
    )
    if federation.lanes == AUTO and first < end_of(trainer, federation.rounds):
        kept = folder / "lanes.json"
        setting, sim = tune(make, server, store, implementations=trainers, kept=kept)
        server = onto(sim.mesh, server)
    return Begun(
        sim=sim,
        last_round=trainers[setting.implementation].last_round,
        server=server,
        store=store,
        checkpointer=checkpointer,
        first=first,
    )


def simulation_of(
    experiment: Experiment, trainer: Federated, table, setting: Setting
) -> Simulation:
    """The simulation of a trainer on the experiment's clients."""
    return simulation(
        trainer.algorithm,
        experiment.feed,
        table,
        experiment.task.population,
        mesh=meshes.first_devices(experiment.mesh, setting.devices),
        lanes=setting.lanes,
        seed=experiment.seed,
        **experiment.federation.options_of(trainer),
    )


def last_simulation(sim: Simulation, last: LastRound) -> Simulation:
    """The simulation of the last round: all clients, another algorithm."""
    canonical = {"reduction": "canonical", "shards": sim.shards}
    return simulation(
        last.algorithm,
        sim.feed,
        sim.table,
        sim.population,
        mesh=sim.mesh,
        local_epochs=last.epochs,
        lanes=sim.lanes,
        seed=sim.seed,
        **(canonical if sim.shards else {}),
    )


def end_of(trainer: Federated | Central, rounds: int) -> int:
    """Number of a stage's last checkpoint."""
    if isinstance(trainer, Central):
        return trainer.settings.epochs
    return rounds + (trainer.last_round is not None)
