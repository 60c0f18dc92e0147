"""Disclosure of each stage: what its clients send, from a trace of one client."""

import numpy as np

from fedfr_jax import trees
from fedfr_jax.federated.communication import trace_client
from fedfr_jax.federated.disclosure import Disclosure, disclose
from fedfr_jax.plan.federated import round_shapes
from fedfr_jax.plan.stages import count_examples, init_stage
from fedfr_jax.types import CentralTrainer, Experiment


def disclose_stage(experiment: Experiment, name: str) -> Disclosure | None:
    """Disclosure of a stage's clients; None for central training.

    Args:
      experiment: its images are never read.
    """
    trainer = experiment.stages[name].trainer
    if isinstance(trainer, CentralTrainer):
        return None
    batching, population = experiment.batching, experiment.task.population
    start, examples = init_stage(experiment, name), count_examples(experiment)
    shapes = round_shapes(experiment, trainer, batching, start, examples)
    largest = int(population.sizes(np.arange(population.num_clients)).max())
    inputs = trees.shapes((shapes.server, shapes.row, shapes.extra, shapes.table))
    trace = trace_client(trainer.algorithm, batching, largest, *inputs, shapes.traffic)
    return disclose(trainer.algorithm, trace, shapes.row)
