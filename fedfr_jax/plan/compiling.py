"""A stage's program as JAX lowers it, from shapes alone: to be compiled, not called."""

import jax

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.compiling import lowered
from fedfr_jax.federated.engine import build_round
from fedfr_jax.federated.shapes import round_arguments
from fedfr_jax.plan.central import central_step
from fedfr_jax.plan.federated import cohort_of, round_shapes
from fedfr_jax.plan.stages import examples_of, start_of
from fedfr_jax.types import Central, Experiment


def lowered_stage(experiment: Experiment, name: str) -> jax.stages.Lowered:
    """A step of a central stage, or a whole round of a federated one.

    Args:
      experiment: its mesh may be of devices that this machine does not have.
    """
    trainer, stored = experiment.stages[name].trainer, examples_of(experiment)
    if isinstance(trainer, Central):
        step = central_step(trainer, experiment.mesh, stored)
        places = jax.tree.map(lambda x: x.sharding, step.state)
        run = jax.jit(
            step.run,
            donate_argnums=1,
            out_shardings=(places, meshes.replicated(step.mesh)),
        )
        return run.lower(*step.arguments)
    feed, federation = experiment.feed, experiment.federation
    start = start_of(experiment, name)
    shapes = round_shapes(experiment, trainer, feed, start, stored)
    run = build_round(
        lambda hyper: trainer.algorithm,
        feed,
        experiment.mesh,
        max_local=int(experiment.task.population.largest(1)[0]),
        shards=federation.fixed_shards,
    )
    arguments = round_arguments(
        experiment.mesh,
        cohort_size=cohort_of(experiment),
        lanes=federation.first_lanes,
        shards=federation.fixed_shards,
        server=shapes.server,
        row=shapes.row,
        extra=shapes.extra,
        table=shapes.table,
        key=shapes.key,
    )
    return lowered(run.whole, *arguments)
