"""Stages as shapes: a simulation whose arrays are ShapeDtypeStructs, and its trace.

Nothing is read, put on a device or compiled.
"""

from typing import NamedTuple

import jax
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.data.stream import Stream
from fedfr_jax.federated import model_parallel
from fedfr_jax.federated.disclosure import (
    ClientTrace,
    Disclosure,
    disclose,
    trace_client,
)
from fedfr_jax.federated.programs import on_mesh
from fedfr_jax.federated.state import Simulation
from fedfr_jax.federated.systems.state import plain_server
from fedfr_jax.types import (
    CentralTrainer,
    Cohort,
    Dataset,
    Experiment,
    FederatedTrainer,
    Prepared,
    PyTree,
)


class StageShapes(NamedTuple):
    """A federated stage before its first round, as shapes on the mesh."""

    sim: Simulation
    server: PyTree
    row: PyTree  # of one client
    extra: Prepared
    client: ClientTrace


def federated_trainer(experiment: Experiment, name: str) -> FederatedTrainer:
    """Trainer of a federated stage."""
    trainer = experiment.stages[name].trainer
    assert isinstance(trainer, FederatedTrainer)
    return trainer


def disclose_stage(experiment: Experiment, name: str) -> Disclosure | None:
    """Disclosure of a stage's clients, from a trace of one; None for central training.

    Args:
      experiment: its images are never read.
    """
    if isinstance(experiment.stages[name].trainer, CentralTrainer):
        return None
    found = stage_shapes(experiment, name)
    return disclose(found.sim.inner_algorithm, found.client, found.row)


def example_shapes(experiment: Experiment) -> Dataset:
    """ShapeDtypeStructs of the stored examples, [T, ...]."""
    dataset = experiment.task.dataset
    if isinstance(dataset, Stream):
        return trees.shapes(dataset.example, dataset.num_examples)
    return trees.shapes(dataset)


def stage_shapes(experiment: Experiment, name: str) -> StageShapes:
    """Build the simulation of a federated stage from shapes, and trace a client."""
    sim = _simulation_of_shapes(experiment, federated_trainer(experiment, name))
    server = server_shapes(experiment, name, sim)
    row = jax.eval_shape(sim.algorithm.init_personal, jax.random.key(0), server)
    context = sim.context(Cohort(np.arange(sim.num_places), 0))
    client = trace_client(sim.inner_algorithm, plain_server(server), row, context)
    return StageShapes(sim, server, row, on_mesh(sim.mesh, client.extra), client)


def _simulation_of_shapes(experiment, trainer) -> Simulation:
    """A trainer's simulation whose examples and key are shapes."""
    from fedfr_jax.runs.stages import build_stage_simulation  # and checkpoints with it

    dataset = on_mesh(experiment.mesh, example_shapes(experiment))
    with meshes.use_described(experiment.mesh.devices.ravel(), memory=0):
        return build_stage_simulation(experiment, trainer, dataset)


def server_shapes(experiment: Experiment, name: str, sim: Simulation) -> PyTree:
    """A federated stage's server as ShapeDtypeStructs with shardings."""
    stage = experiment.stages[name]
    start = stage.init_from_stage and end_shapes(experiment, stage.init_from_stage)
    trainer = federated_trainer(experiment, name)

    def init_server(variables):
        return sim.algorithm.init(trainer.init_variables(variables))

    server = jax.eval_shape(init_server, start)
    return meshes.shapes_at(server, model_parallel.placement(sim.mesh, server))


def end_shapes(experiment: Experiment, name: str) -> PyTree:
    """Variables at the end of a stage, as ShapeDtypeStructs."""
    trainer = experiment.stages[name].trainer
    if isinstance(trainer, FederatedTrainer):
        assert trainer.global_model, "a stage that another starts from has a model"
        sim = _simulation_of_shapes(experiment, trainer)
        return jax.eval_shape(
            trainer.global_model, server_shapes(experiment, name, sim)
        )
    variables = jax.eval_shape(trainer.init, jax.random.key(0))
    if classes := trainer.sharded_classes:  # without its padding
        rows = variables["params"][classes.path]
        rows = jax.ShapeDtypeStruct((len(classes.names), *rows.shape[1:]), rows.dtype)
        variables["params"] = {**variables["params"], classes.path: rows}
    return variables
