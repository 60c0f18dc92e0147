"""Plans of an experiment's stages: memory, time, and the largest sizes that fit."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from scipy import optimize

from fedfr_jax.plan.central import central_needs
from fedfr_jax.plan.devices import GIB, Device, Requirements
from fedfr_jax.plan.federated import federated_needs
from fedfr_jax.plan.shapes import example_shapes
from fedfr_jax.types import (
    CentralTrainer,
    Experiment,
    FederatedTrainer,
)

NEAR = 0.02  # relative error of the largest sizes


def max_that_fits(
    memory_of: Callable[[int], float], now: int, unit: int, room: float
) -> int:
    """Approximate largest multiple of `unit` whose memory fits; 0 if none does.

    Args:
      memory_of: number -> bytes, increasing and about convex, as a maximum of several
        needs is; each call traces a program.
      now: a number; its memory and that of its double give the first slope.
      unit: of the answer.
      room: bytes.
    """

    @functools.cache
    def excess_of(units: int) -> float:
        return memory_of(units * unit) - room

    low = max(now // unit, 1)
    if excess_of(low) > 0:
        low = 1
    if excess_of(low) > 0:
        return 0
    slope = (excess_of(2 * low) - excess_of(low)) / low
    if slope <= 0:
        return low * unit
    # The slope at the start is too small, so this is too many, or just fits.
    units = math.floor(low - excess_of(low) / slope)
    if excess_of(units) > 0:
        found = optimize.root_scalar(
            lambda x: excess_of(round(x)), bracket=(low, units), xtol=0.5, rtol=NEAR / 2
        )
        units = round(found.root)
    while excess_of(units) > 0:
        units = math.floor(units * (1 - NEAR / 2))
    return units * unit


AUTO, STREAM = "auto", "stream"  # of config.federation.data_placement
MIN_IMAGES = 2  # of a batch, for its statistics
NUM_COPIES = 3  # of a resident data set: it is copied, and as much must stay free


class StagePlan(NamedTuple):
    """Plan of a stage on a device."""

    needs: Requirements
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
        """Whether the stage fits the device."""
        return self.memory <= self.device.capacity


def plan_stage(
    experiment: Experiment,
    name: str,
    device: Device,
    *,
    table: str = AUTO,
    hard_negatives: int | None = None,
) -> StagePlan:
    """Plan a stage: its requirements, time, and the largest sizes that fit.

    Args:
      experiment: on a mesh of as many devices as the stage will have; the images of its
        sources are never read.
      table: config.federation.data_placement.
      hard_negatives: see `federated_needs`.
    """
    needs_of = needs_function(experiment, name, hard_negatives)
    needs = needs_of()
    stored = example_shapes(experiment)
    whole = stored.num_examples * stored.example_bytes
    is_streamed = table == STREAM or (
        table == AUTO and NUM_COPIES * whole > device.capacity
    )
    size = experiment.federation.stream_buffer_gib * GIB if is_streamed else whole
    room = device.capacity - size
    max_local = int(experiment.task.population.largest(1)[0]) + needs.added
    trainer = experiment.stages[name].trainer
    fits = fitting_values(trainer, needs, needs_of, room, max_local)
    return StagePlan(needs, size, is_streamed, fits, device)


def needs_function(
    experiment: Experiment, name: str, hard_negatives: int | None = None
) -> Callable[..., Requirements]:
    """Build (**changed numbers) -> `Requirements` of a stage."""
    trainer = experiment.stages[name].trainer
    if isinstance(trainer, CentralTrainer):
        stored = example_shapes(experiment)
        return functools.partial(central_needs, trainer, experiment.mesh, stored)
    return functools.partial(
        federated_needs, experiment, name, hard_negatives=hard_negatives
    )


def fitting_values(
    trainer: CentralTrainer | FederatedTrainer,
    needs: Requirements,
    needs_of: Callable,
    room: float,
    max_local: int,
) -> dict[str, int]:
    """Largest batch size, lanes, ... with which a stage fits `room` bytes, one by one.

    Args:
      max_local: largest number of examples of a client.
    """
    by_batch = lambda n: needs_of(batch_size=n).memory
    max_batch = functools.partial(max_that_fits, by_batch, needs.batch_size, room=room)
    if not isinstance(trainer, CentralTrainer):
        lane = needs.parts["training, all lanes"] / needs.lanes
        free = room - needs.memory + needs.lanes * lane
        return {
            "lanes": min(max(math.floor(free / lane), 0), needs.clients),
            "batch_size": min(max_batch(unit=MIN_IMAGES), max_local),
        }
    unit = MIN_IMAGES * needs.devices * trainer.settings.gradient_accumulation_steps
    fits = {"batch_size": min(max_batch(unit=unit), trainer.num_rows // unit * unit)}
    if needs.classes:
        by_classes = lambda n: needs_of(num_classes=n).memory
        rows_each = max(needs.classes // needs.devices, 1)  # rows come in whole chunks
        unit = needs.devices * min(trainer.settings.class_chunk_size or 1, rows_each)
        fits["classes"] = max_that_fits(by_classes, needs.classes, unit, room)
    return fits


def as_numbers(planned: StagePlan) -> dict[str, Any]:
    """Convert a stage's plan to JSON."""
    needs, device = planned.needs, planned.device
    seconds = needs.seconds(device)
    return {
        "kind": "federated" if needs.lanes else "central",
        "batch_size": needs.batch_size,
        "lanes": needs.lanes or None,
        "classes": needs.classes or None,
        "parameters": needs.parameters,
        "bytes": {**needs.parts, "examples": planned.examples},
        "total_bytes": planned.memory,
        "usable_bytes": device.capacity,
        "fits": planned.has_room,
        "is_streamed": planned.is_streamed,
        "max_that_fit": dict(planned.fits),
        "forward_flops_per_image": needs.forward,
        "flops_per_image": needs.flops,
        "images": needs.images,
        "images_per_second": needs.images / max(seconds, 1e-9),
        "utilization": needs.utilization(device),
        "hours": seconds / 3600,
        "notes": list(needs.notes),
    }
