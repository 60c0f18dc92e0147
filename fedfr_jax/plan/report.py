"""Text reports of plans and compiled programs."""

from collections.abc import Mapping

from fedfr_jax.plan.devices import GIB, REACHED, STREAMED, Device

ABOUT = (
    f"Expected, not measured: products at {REACHED:.0%} of their peak, the rest at "
    f"{STREAMED:.0%} of the memory's bandwidth, one kernel after the other. Not "
    "included: evaluation, checkpoints, waiting for images, and slower links between "
    "hosts."
)


def format_stage(name: str, numbers: Mapping, device: Device, devices: int) -> str:
    """Format the plan of one stage, from `stages.as_numbers`."""
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
    if seconds := program["optimal_seconds"]:
        parts.append(f"{1e3 * seconds:.2f} ms with one iteration per loop (estimate)")
    return "\n  ".join([f"{name}:", *parts])


def _collectives(counts):
    items = counts["collectives"].items()
    parts = [f"{n} {kind} ({counts['megabytes'][kind]:,.1f} MB)" for kind, n in items]
    return ", ".join(parts) or "none"
