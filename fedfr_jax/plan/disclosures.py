"""Disclosure of each stage: what its clients send, from a trace of one client."""

from fedfr_jax.federated.disclosure import Disclosure, disclose
from fedfr_jax.plan.shapes import stage_shapes
from fedfr_jax.types import CentralTrainer, Experiment


def disclose_stage(experiment: Experiment, name: str) -> Disclosure | None:
    """Disclosure of a stage's clients; None for central training.

    Args:
      experiment: its images are never read.
    """
    if isinstance(experiment.stages[name].trainer, CentralTrainer):
        return None
    found = stage_shapes(experiment, name)
    algorithm = found.sim.inner_algorithm or found.sim.algorithm
    return disclose(algorithm, found.client, found.row)
