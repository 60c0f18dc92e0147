"""A method of an experiment on its way into the loop: fresh, resumed, as fast as it
gets on this machine."""

from typing import NamedTuple

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.model_axis import onto
from fedfr_jax.federated.simulation import Simulation, simulation, start
from fedfr_jax.federated.store import Store
from fedfr_jax.federated.stream import placed
from fedfr_jax.federated.tuning import Setting, tune
from fedfr_jax.runs import loop
from fedfr_jax.runs.checkpoint import Checkpointer
from fedfr_jax.runs.pretraining import public_means
from fedfr_jax.runs.settings import AUTO, Pretraining
from fedfr_jax.tasks.faces.methods import FaceMethod, LastRound
from fedfr_jax.types import Algorithm, PyTree


class Begun(NamedTuple):
    """A method ready to be trained, or at its end."""

    sim: Simulation
    last_round: LastRound | None
    server: PyTree
    store: Store
    checkpointer: Checkpointer
    first: int  # the round to play next


def begin(experiment, method: FaceMethod, variables, folder) -> Begun:
    """Start from `variables` or go on where the folder stopped, as fast as measured."""
    federation, mesh = experiment.federation, experiment.mesh
    table = placed(experiment.task.table, mesh)
    setting = Setting(lanes=federation.first_lanes)
    lowered = {setting.lowering: method, **method.lowered}
    make = lambda setting: simulation_of(
        experiment, lowered[setting.lowering].algorithm, table, setting
    )
    sim = make(setting)
    backbone, phi = variables["backbone"], variables["phi"]
    if method.init_fc:
        phi = public_means(experiment.model, experiment.task, mesh, backbone)
    server = start(sim, method.start(backbone, phi))
    server, store, checkpointer, first = loop.resume(sim, server, folder)
    if federation.lanes == AUTO and first < end_of(method, federation.rounds):
        kept = folder / "lanes.json"
        setting, sim = tune(make, server, store, lowerings=lowered, kept=kept)
        server = onto(sim.mesh, server)
    last_round = lowered[setting.lowering].last_round
    return Begun(
        sim=sim,
        last_round=last_round,
        server=server,
        store=store,
        checkpointer=checkpointer,
        first=first,
    )


def simulation_of(experiment, algorithm: Algorithm, table, setting: Setting):
    """The simulation of an algorithm on the experiment's clients."""
    federation = experiment.federation
    return simulation(
        algorithm,
        federation.feed,
        table,
        experiment.task.population,
        mesh=meshes.first_devices(experiment.mesh, setting.devices),
        cohort_size=federation.cohort_size,
        local_epochs=federation.local_epochs,
        lanes=setting.lanes,
        seed=experiment.seed,
        reduction=federation.reduction,
        shards=federation.shards,
    )


def end_of(method: FaceMethod | Pretraining, rounds: int) -> int:
    """Number of a row's last checkpoint."""
    if isinstance(method, FaceMethod):
        return rounds + (method.last_round is not None)
    return method.epochs
