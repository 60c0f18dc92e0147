"""Plans of an experiment's stages: memory, time, and the largest sizes that fit."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from fedfr_jax import trees
from fedfr_jax.data.stream import Stream
from fedfr_jax.plan.central import central_needs
from fedfr_jax.plan.devices import GIB, Device
from fedfr_jax.plan.federated import federated_needs
from fedfr_jax.plan.requirements import Requirements
from fedfr_jax.types import (
    CentralTrainer,
    Dataset,
    Experiment,
    FederatedTrainer,
    PyTree,
)

TRIES, NEAR = 8, 0.02


def max_that_fits(
    memory_of: Callable[[int], float], now: int, unit: int, room: float
) -> int:
    """Approximate largest multiple of `unit` whose memory fits; 0 if none does.

    Args:
      memory_of: number -> bytes, rising and about convex, as the largest of several
        needs is; each call traces a program.
      unit: of the answer; where memory rises in stairs, the length of one.
      now: a number from which, and from whose double, the growth is taken.
      room: bytes.
    """
    low, least = now, memory_of(now)
    if least > room:
        low, least = unit, memory_of(unit)
        if low >= now or least > room:
            return 0
    end = -(-low // unit) * unit
    if end > low and (most := memory_of(end)) <= room:
        low, least = end, most
    twice = memory_of(2 * low)
    each = (twice - least) / low
    if each <= 0:
        return low
    # The growth at its start is too small, so this is too many, or just fits.
    high = _down(low + (room - least) / each, unit)
    most = memory_of(high) if high > low else least
    is_above = False  # where a chord ended: a hair's breadth above the room, on stairs
    for _ in range(TRIES):
        if most <= room:
            return max(high, low)
        # A chord lies above the curve: where it fits, the curve does.
        share = (room - least) / (most - least)
        middle = max(_down(low + share * (high - low), unit), low)
        if is_above or middle - low < NEAR * low:
            near = (1 - NEAR) * high if is_above else low
            middle = _down(max((low + high) / 2, near), unit)
        if middle <= low or high - low < NEAR * low:
            break
        found = memory_of(middle)
        is_above = found > room
        if is_above:
            high, most = middle, found
        else:
            low, least = middle, found
    return low


def _down(number: float, unit: int) -> int:
    return int(number // unit) * unit


AUTO, STREAM = "auto", "stream"  # of config.federation.data_placement
LEAST_IMAGES = 2  # of a batch, for its statistics
TABLES = 3  # sizes of one that is not streamed: it is copied, and as much must be free


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


def count_examples(experiment: Experiment) -> Dataset:
    """ShapeDtypeStructs of the stored examples, [T, ...]."""
    table = experiment.task.dataset
    if isinstance(table, Stream):
        return trees.shapes(table.example, table.num_examples)
    return trees.shapes(table)


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
      experiment: on a mesh of as many devices as there will be; the images of its
        sources are never read.
      table: as of config.federation: where the examples lie.
      hard_negatives: see `federated_needs`.
    """
    needs_of = needs_function(experiment, name, hard_negatives)
    needs = needs_of()
    stored = count_examples(experiment)
    whole = stored.num_examples * stored.example_bytes
    is_streamed = table == STREAM or (
        table == AUTO and TABLES * whole > device.capacity
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
    stage, stored = experiment.stages[name], count_examples(experiment)
    if isinstance(stage.trainer, CentralTrainer):
        found = functools.partial(central_needs, stage.trainer, experiment.mesh, stored)
    else:
        start = init_stage(experiment, name)
        found = functools.partial(
            federated_needs, experiment, stage.trainer, start, stored
        )
        found = functools.partial(found, hard_negatives=hard_negatives)
    return found


def init_stage(experiment: Experiment, name: str) -> PyTree | None:
    """Shapes of the variables that a stage starts from; None if it initializes them."""
    before = experiment.stages[name].init_from_stage
    if before is None:
        return None
    return jax.eval_shape(experiment.stages[before].trainer.init, jax.random.key(0))


def fitting_values(
    trainer: CentralTrainer | FederatedTrainer,
    needs: Requirements,
    needs_of: Callable,
    room: float,
    max_local: int,
) -> dict[str, int]:
    """Largest batch size, lanes, ... with which a stage fits `room` bytes, one by one.

    Args:
      max_local: most examples that a client can have.
    """
    by_batch = lambda n: needs_of(batch_size=n).memory
    most = functools.partial(max_that_fits, by_batch, needs.batch_size, room=room)
    if not isinstance(trainer, CentralTrainer):
        lane = needs.parts["training, all lanes"] / needs.lanes
        free = room - needs.memory + needs.lanes * lane
        return {
            "lanes": min(max(math.floor(free / lane), 0), needs.clients),
            "batch_size": min(most(unit=LEAST_IMAGES), max_local),
        }
    unit = LEAST_IMAGES * needs.devices * trainer.settings.gradient_accumulation_steps
    fits = {"batch_size": min(most(unit=unit), trainer.num_rows // unit * unit)}
    if needs.classes:
        by_classes = lambda n: needs_of(num_classes=n).memory
        each = max(needs.classes // needs.devices, 1)  # rows come in whole chunks
        unit = needs.devices * min(trainer.settings.class_chunk_size or 1, each)
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
        "largest_arrays": [list(x) for x in needs.largest_arrays],
        "forward_flops_per_image": needs.forward,
        "flops_per_image": needs.flops,
        "images": needs.images,
        "images_per_second": needs.images / max(seconds, 1e-9),
        "utilization": needs.utilization(device),
        "hours": seconds / 3600,
        "notes": list(needs.notes),
    }
