"""Central training of a face network on random images, as `fedfr train` runs it."""

import functools
import statistics
import time
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax.central.class_parallel import CLASS_TABLE
from fedfr_jax.central.epochs import build_epochs
from fedfr_jax.central.settings import Training, build_mesh
from fedfr_jax.data.augment import normalize
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.stream import place_examples
from fedfr_jax.tasks.faces.loss import backbone_of
from fedfr_jax.tasks.faces.public_classes import (
    build_public_loss,
    first_variables,
    padded_rows,
)
from fedfr_jax.types import CentralTrainer, Dataset, Model, ShardedClasses


class Times(NamedTuple):
    """Seconds of a step, in the fastest epoch and in the median one."""

    least: float
    median: float
    loss: float  # of the last epoch


def trainer_of(
    model: Model, num_classes: int, settings: Training, num_steps: int, mesh: Mesh
) -> CentralTrainer:
    """A stage whose epochs have `num_steps` steps."""
    random, count = np.random.default_rng(0), num_steps * settings.batch_size
    images = random.integers(0, 256, (count, *model.input_shape), np.uint8)
    labels = random.integers(0, num_classes, count, np.int32)
    rows, table = num_classes, None
    if settings.class_parallel:
        rows = padded_rows(settings, num_classes, mesh)
        table = ShardedClasses(CLASS_TABLE, range(num_classes))
    return CentralTrainer(
        settings=settings,
        dataset=Dataset.from_arrays(images, labels),
        first_row=0,
        num_rows=count,
        batching=Batching(settings.batch_size, normalize()),
        loss=build_public_loss(model, settings, mesh),
        init=functools.partial(first_variables, model, rows, margin=settings.loss()),
        global_model=backbone_of,
        apply_global=lambda variables, x: model.apply(variables, x, False)[0],
        sharded_classes=table,
        count_flops=model.count_flops,
    )


class Running:
    """A trainer's state, an epoch at a time."""

    def __init__(self, trainer: CentralTrainer, mesh: Mesh):
        own = build_mesh(trainer.settings, mesh)
        self._epochs = build_epochs(trainer, own, 0)
        self._table = place_examples(trainer.dataset, own)
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
