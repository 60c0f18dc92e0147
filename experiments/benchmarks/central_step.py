"""Central training of a face network on random images, as `fedfr train` runs it."""

import functools
import statistics
import time
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax.central.class_rows import CLASS_TABLE
from fedfr_jax.central.settings import Training, mesh_of
from fedfr_jax.data.augment import normalize
from fedfr_jax.feed import Feed
from fedfr_jax.runs.central_stage import epochs_of
from fedfr_jax.stream import placed
from fedfr_jax.tasks.faces.loss import backbone_of
from fedfr_jax.tasks.faces.public import first_variables
from fedfr_jax.tasks.faces.public_training import (
    loss_of,
    margin_rule,
    padded_rows,
)
from fedfr_jax.types import Central, ClassTable, Dataset, Model


class Times(NamedTuple):
    """Seconds of a step, in the fastest epoch and in the median one."""

    least: float
    median: float
    loss: float  # of the last epoch


def trainer_of(
    model: Model, num_classes: int, settings: Training, num_steps: int, mesh: Mesh
) -> Central:
    """A stage whose epochs have `num_steps` steps."""
    random, count = np.random.default_rng(0), num_steps * settings.batch_size
    images = random.integers(0, 256, (count, *model.image_shape), np.uint8)
    labels = random.integers(0, num_classes, count, np.int32)
    rows, table = num_classes, None
    if settings.class_parallel:
        rows = padded_rows(settings, num_classes, mesh)
        table = ClassTable(CLASS_TABLE, range(num_classes))
    rule = margin_rule(settings)
    return Central(
        settings=settings,
        dataset=Dataset.labelled(images, labels),
        first_row=0,
        num_rows=count,
        feed=Feed(settings.batch_size, normalize()),
        loss=loss_of(model, rule, settings, mesh),
        init=functools.partial(first_variables, model, rows, margin=rule),
        network=backbone_of,
        network_apply=lambda variables, x: model.apply(variables, x, False)[0],
        table=table,
        count_flops=model.count_flops,
    )


class Running:
    """A trainer's state, an epoch at a time."""

    def __init__(self, trainer: Central, mesh: Mesh):
        own = mesh_of(trainer.settings, mesh)
        self._epochs = epochs_of(trainer, own, 0)
        self._table = placed(trainer.dataset, own)
        first = functools.partial(trainer.init, jax.random.key(0))
        self._state = self._epochs.init(first)
        self._epoch = 0

    def seconds(self) -> tuple[float, float]:
        """(seconds of a step, loss) of the next epoch; the first one compiles."""
        begin = time.perf_counter()
        self._state, found = jax.block_until_ready(
            self._epochs.run(self._state, self._table, self._epoch)
        )
        self._epoch += 1
        spent = time.perf_counter() - begin
        return spent / self._epochs.num_steps, found["loss"]

    def times(self, rounds: int) -> Times:
        """Of some epochs after one that is not counted."""
        self.seconds()
        found = [self.seconds() for _ in range(rounds)]
        spent = [seconds for seconds, _ in found]
        return Times(min(spent), statistics.median(spent), found[-1][1])
