"""Plans of an experiment's stages: memory, time, and the largest sizes that fit."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from scipy import optimize

from fedfr_jax.convolutions import use_forms
from fedfr_jax.plan.devices import GIB, REACHED, STREAMED, Device
from fedfr_jax.plan.needs import Requirements, needs_function
from fedfr_jax.runs.shapes import example_shapes
from fedfr_jax.types import (
    CentralTrainer,
    Dataset,
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


MIN_IMAGES = 2  # of a batch, for its statistics
NUM_COPIES = 3  # of a resident data set: it is copied, and as much must stay free


@use_forms("xla")
def plan_stage(
    experiment: Experiment,
    name: str,
    device: Device,
    hard_negatives: int | None = None,
) -> dict[str, Any]:
    """Plan a stage: its requirements, time, and the largest sizes that fit, as JSON.

    Args:
      experiment: on a mesh of as many devices as the stage will have; the images of its
        sources are never read.
      hard_negatives: see `federated_needs`.
    """
    needs_of = needs_function(experiment, name, hard_negatives, bool(device.clock))
    needs = needs_of()
    stored = example_shapes(experiment)
    whole = stored.num_examples * stored.example_bytes
    federation, placement = experiment.federation, experiment.federation.data_placement
    is_streamed = placement == "stream" or (
        placement == "auto" and NUM_COPIES * whole > device.capacity
    )
    size = federation.stream_buffer_gib * GIB if is_streamed else whole
    copied = 0 if is_streamed else _copied_bytes(needs, stored, device)
    room = device.capacity - size - copied
    max_local = int(experiment.task.population.largest(1)[0]) + needs.added
    trainer, seconds = experiment.stages[name].trainer, needs.seconds(device)
    fits = fitting_values(trainer, needs, needs_of, room, max_local)
    lanes = {}
    if needs.lanes:
        fastest = needs.fastest_lanes(device, max(fits["lanes"], 1))
        lanes = {"idle_ratio": 1 / needs.work[0].busy, "fastest_lanes": fastest}
    return {
        "kind": "federated" if needs.lanes else "central",
        "batch_size": needs.batch_size,
        "lanes": needs.lanes or None,
        "classes": needs.classes or None,
        "parameters": needs.parameters,
        "bytes": {**needs.parts, "examples": size, COPY: copied},
        "total_bytes": needs.memory + size + copied,
        "usable_bytes": device.capacity,
        "fits": needs.memory <= room,
        "is_streamed": is_streamed,
        "max_that_fit": fits,
        **lanes,
        "forward_flops_per_image": needs.forward,
        "flops_per_image": needs.flops,
        "images": needs.images,
        "images_per_second": needs.images / max(seconds, 1e-9),
        "utilization": needs.utilization(device),
        "hours": seconds / 3600,
        "footprint": dict(needs.spent) or None,
        "notes": [*needs.notes, *_tile_notes(needs, device)],
    }


COPY = "copy of the examples, in tiles"


def _copied_bytes(needs: Requirements, stored: Dataset, device: Device) -> float:
    """Bytes of a TPU's copy of its images, in tiles of 8 rows by 128 columns.

    Images that fill their tiles are not copied.
    """
    shape: Any = stored.input_shape
    if not (device.clock and needs.lanes) or len(shape) != 3 or isinstance(shape, dict):
        return 0.0
    height, width, _ = shape
    tiles = -(-height // 8) * 8 * -(-width // 128) * 128
    ratio = tiles / (height * width)
    return ratio * stored.num_examples * stored.example_bytes if ratio > 1 else 0.0


def _tile_notes(needs: Requirements, device: Device) -> list[str]:
    """What a TPU's tiles of eight rows make of a client's batch."""
    batch, rows = needs.batch_size, -(-needs.batch_size // 8) * 8
    if not (device.clock and needs.lanes) or batch == rows:
        return []
    return [f"a client's batch of {batch} takes a TPU's tiles of {rows}, as {rows} do"]


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


ABOUT = (
    f"Expected, not measured: products at {REACHED:.0%} of their peak, the rest at "
    f"{STREAMED:.0%} of the memory's bandwidth, one kernel after the other. Not "
    "included: evaluation, checkpoints, waiting for images, and slower links between "
    "hosts."
)


def format_stage(name: str, numbers: Mapping, device: Device, devices: int) -> str:
    """Format the plan of one stage, of `plan_stage`."""
    size = lambda x: f"{x / GIB:10.3f} GiB"
    lines = [f"{name}: {_describe(numbers)}"]
    lines += [f"  {part:46}{size(x)}" for part, x in numbers["bytes"].items() if x > 0]
    verdict = "" if numbers["fits"] else "   DOES NOT FIT"
    usable = f" of {numbers['usable_bytes'] / GIB:.1f}"
    total = size(numbers["total_bytes"])
    lines.append(f"  {'each device':46}{total}{usable}{verdict}")
    rate = numbers["images_per_second"]
    sizes = {k.removesuffix("_size"): x for k, x in numbers["max_that_fit"].items()}
    fits = ", ".join(f"{k} {x:,}" for k, x in sizes.items())
    lines += [
        f"  {'FLOP for an image: forward, trained':46}"
        f"{_short(numbers['forward_flops_per_image'])},"
        f" {_short(numbers['flops_per_image'])}",
        f"  {'images/s: all devices, each':46}{rate:,.0f}, {rate / devices:,.0f}",
        f"  {f'MFU (of {device.bfloat16 / 1e12:,.3g} TFLOP/s)':46}"
        f"{numbers['utilization']:.1%}",
        f"  {'time':46}{duration(3600 * numbers['hours'])}",
        f"  {'largest that fit, one at a time':46}{fits}",
    ]
    if lanes := numbers["lanes"]:
        ratio, fastest = numbers["idle_ratio"], numbers["fastest_lanes"]
        told = f"{lanes}, {ratio:.2f}; expected fastest: {fastest} lanes"
        lines.append(f"  {'lanes, idle ratio':46}{told}")
    if spent := numbers["footprint"]:
        costs = (
            f"{spent['energy_kwh']:.3g} kWh, {spent['co2_kg']:.3g} kg CO2, price "
            f"{spent['price']:.3g}"
        )
        lines.append(f"  {'clients of all rounds spend':46}{costs}")
    notes = [*_notes(numbers), device.note] if device.note else _notes(numbers)
    lines += [f"  ({note})" for note in notes]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Format a duration in its largest unit.

    >>> duration(0.144), duration(750), duration(20_000), duration(1e6)
    ('0.14 s', '12 min', '5.6 hours', '12 days')
    """
    for unit, size in (("days", 86400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.0f} s"


def _describe(numbers):
    parameters = f"{numbers['parameters']:,} parameters"
    if numbers["kind"] == "central":
        classes = numbers["classes"]
        if classes:
            parameters = f"{classes:,} classes, {parameters}"
        return f"central, {numbers['batch_size']:,} images a step, {parameters}"
    return (
        f"federated, batches of {numbers['batch_size']:,}, lanes {numbers['lanes']}, "
        f"{parameters}"
    )


def _notes(numbers):
    location = "streamed from the host" if numbers["is_streamed"] else "on every device"
    return [f"examples {location}", *numbers["notes"]]


def _short(number: float) -> str:
    """Format a number with a unit prefix: 1.23e+10 as 12.3 G."""
    units = ["", "k", "M", "G", "T"]
    while number >= 1000 and len(units) > 1:
        number, units = number / 1000, units[1:]
    return f"{number:.3g} {units[0]}"


def format_programs(name: str, programs: Mapping[str, Mapping]) -> str:
    """Format a stage's compiled programs, see `aot.compile_programs`."""
    lines = [_format_program(f"{name}, {k}", x) for k, x in programs.items()]
    return "\n".join(lines)


def _format_program(name, program):
    if "gib" not in program:
        return f"{name}: does not fit. {program['says']}"
    size, step = program["gib"], program["step"] or {}
    verdict = "" if program["fits"] else ", TOO LARGE"
    parts = [
        f"{size['needed']:.2f} GiB a device ({size['arguments']:.2f} arguments, "
        f"{size['temporaries']:.2f} temporary){verdict}",
        "collectives: " + _collectives(program["whole"]),
    ]
    if step:
        parts.append(
            f"a step: {step['kernels']} kernels, {step['convolutions']} of convolutions"
            f", collectives: {_collectives(step)}"
        )
    if cycles := step.get("cycles"):
        parts.append(f"{cycles:,} cycles a step (the compiler's estimate)")
    return "\n  ".join([f"{name}:", *parts])


def _collectives(counts):
    items = counts["collectives"].items()
    parts = [f"{n} {kind} ({counts['megabytes'][kind]:,.1f} MB)" for kind, n in items]
    return ", ".join(parts) or "none"
