"""The plan of an experiment's stages on a device: needs, time, and what would fit."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from fedfr_jax.plan.central import central_needs
from fedfr_jax.plan.devices import GIB, Device
from fedfr_jax.plan.federated import federated_needs
from fedfr_jax.plan.fitting import largest
from fedfr_jax.plan.needs import Needs
from fedfr_jax.stream import Stream
from fedfr_jax.types import Central, Dataset, Experiment, Federated, PyTree

AUTO, STREAM = "auto", "stream"  # of config.federation.table
LEAST_IMAGES = 2  # of a batch, for its statistics
TABLES = 3  # sizes of one that is not streamed: it is copied, and as much must be free


class Planned(NamedTuple):
    """A stage on a device."""

    needs: Needs
    examples: float  # bytes of the stored examples on a device
    is_streamed: bool
    fits: Mapping[str, int]  # {"batch_size": the largest that fits, ...}
    device: Device

    @property
    def memory(self) -> float:
        """Bytes on a device."""
        return self.needs.memory + self.examples

    @property
    def has_room(self) -> bool:
        """Whether it fits."""
        return self.memory <= self.device.capacity


def examples_of(experiment: Experiment) -> Dataset:
    """Shapes of the stored examples, [T, ...]."""
    table = experiment.task.dataset
    count = table.num_examples
    if isinstance(table, Stream):
        shape = lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype)
        return jax.tree.map(shape, table.example)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), table)


def plan_stage(
    experiment: Experiment,
    name: str,
    device: Device,
    *,
    table: str = AUTO,
    hard_negatives: int | None = None,
) -> Planned:
    """What a stage needs and how long it takes.

    Args:
      experiment: on a mesh of as many devices as there will be; the images of its
        sources are never read.
      table: as of config.federation: where the examples lie.
      hard_negatives: see `federated_needs`.
    """
    needs_of = needs_function(experiment, name, hard_negatives)
    needs = needs_of()
    stored = examples_of(experiment)
    whole = stored.num_examples * stored.row_bytes
    is_streamed = table == STREAM or (
        table == AUTO and TABLES * whole > device.capacity
    )
    size = experiment.federation.table_gib * GIB if is_streamed else whole
    room = device.capacity - size
    max_local = int(experiment.task.population.largest(1)[0]) + needs.added
    trainer = experiment.stages[name].trainer
    fits = fitting(trainer, needs, needs_of, room, max_local)
    return Planned(needs, size, is_streamed, fits, device)


def needs_function(
    experiment: Experiment, name: str, hard_negatives: int | None = None
) -> Callable[..., Needs]:
    """(**changed numbers) -> `Needs` of a stage."""
    stage, stored = experiment.stages[name], examples_of(experiment)
    if isinstance(stage.trainer, Central):
        found = functools.partial(central_needs, stage.trainer, experiment.mesh, stored)
    else:
        start = start_of(experiment, name)
        found = functools.partial(
            federated_needs, experiment, stage.trainer, start, stored
        )
        found = functools.partial(found, hard_negatives=hard_negatives)
    return found


def start_of(experiment: Experiment, name: str) -> PyTree | None:
    """Shapes of the variables that a stage starts from, None for its own."""
    before = experiment.stages[name].start_from
    if before is None:
        return None
    return jax.eval_shape(experiment.stages[before].trainer.init, jax.random.key(0))


def fitting(
    trainer: Central | Federated,
    needs: Needs,
    needs_of: Callable,
    room: float,
    max_local: int,
) -> dict[str, int]:
    """The largest numbers, one at a time, with which a stage fits `room` bytes.

    Args:
      max_local: most examples that a client can have.
    """
    by_batch = lambda n: needs_of(batch_size=n).memory
    most = functools.partial(largest, by_batch, needs.batch_size, room=room)
    if not isinstance(trainer, Central):
        lane = needs.parts["training, all lanes"] / needs.lanes
        free = room - needs.memory + needs.lanes * lane
        return {
            "lanes": min(max(math.floor(free / lane), 0), needs.clients),
            "batch_size": min(most(unit=LEAST_IMAGES), max_local),
        }
    unit = LEAST_IMAGES * needs.devices * trainer.settings.micro_batches
    fits = {"batch_size": min(most(unit=unit), trainer.num_rows // unit * unit)}
    if needs.classes:
        by_classes = lambda n: needs_of(num_classes=n).memory
        each = max(needs.classes // needs.devices, 1)  # rows come in whole chunks
        unit = needs.devices * min(trainer.settings.class_chunk or 1, each)
        fits["classes"] = largest(by_classes, needs.classes, unit, room)
    return fits


def as_numbers(planned: Planned) -> dict[str, Any]:
    """A stage's plan as JSON."""
    needs, device = planned.needs, planned.device
    seconds = needs.seconds(device)
    return {
        "kind": "federated" if needs.lanes else "central",
        "batch_size": needs.batch_size,
        "lanes": needs.lanes or None,
        "classes": needs.classes or None,
        "parameters": needs.parameters,
        "bytes": {**needs.parts, "examples": planned.examples},
        "bytes_in_all": planned.memory,
        "bytes_usable": device.capacity,
        "fits": planned.has_room,
        "is_streamed": planned.is_streamed,
        "largest_that_fit": dict(planned.fits),
        "largest_arrays": [list(x) for x in needs.largest],
        "forward_flops_per_image": needs.forward,
        "flops_per_image": needs.flops,
        "images": needs.images,
        "images_per_second": needs.images / max(seconds, 1e-9),
        "utilisation": needs.utilisation(device),
        "hours": seconds / 3600,
        "notes": list(needs.notes),
    }
