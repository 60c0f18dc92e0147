"""Disclosure of each stage: what its clients send, from a trace of one client."""

from fedfr_jax.federated.disclosure import Disclosure, disclose
from fedfr_jax.plan.federated import client_trace, round_shapes
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
    start, examples = init_stage(experiment, name), count_examples(experiment)
    shapes = round_shapes(experiment, trainer, start, examples)
    trace = client_trace(experiment, trainer, shapes)
    return disclose(trainer.algorithm, trace, shapes.row)
