"""Compiled programs parsed from HLO text: collectives, kernels, steps.

A fusion is one kernel. A loop's body counts once per iteration if the compiler knows
their number, else once. A step, local or of central training, is one iteration: of the
loop with the most convolutions among those of unknown length, or of the counted loop in
its body, see `local.run_steps`.
"""

import math
import re
from collections import Counter, defaultdict
from typing import NamedTuple

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
# Instructions that are kernels of their own; others are part of these, or free.
KERNELS = ("fusion", "custom-call", "convolution", "dot", "reduce", "sort", "copy")
KERNELS += ("scatter", "gather", "dynamic-slice", "dynamic-update-slice", "transpose")

HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$", re.MULTILINE)
LINE = re.compile(r"^ +(?:ROOT )?%?[\w.-]+ = (.+?) ([a-z][\w-]*)\((.*)$", re.MULTILINE)
SHAPE = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
CALLS = re.compile(r"\b(?:body|calls|to_apply|branch_computations)=(\{[^}]*\}|[^ ,]+)")
CONDITION = re.compile(r"\bcondition=%?([\w.-]+)")
BODY = re.compile(r"\bbody=%?([\w.-]+)")
TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# A shape, its axes from minor to major, and the tile of the minor ones
TILED = re.compile(
    r"\b(pred|[a-z]+(?=\d))(\d*)\w*\[([\d,]*)\](?:\{([\d,]*)(?::T\(([\d,]+)\))?)?"
)
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
UNKNOWN = 2**62  # estimates above are of what the compiler does not know
GROUPS = re.compile(r"\bfeature_group_count=(\d+)")
WINDOW = re.compile(r"\bwindow=\{size=([\dx]+)")
CONSTANT = re.compile(r"= [su]32\[\][^ ]* constant\((\d+)\)")


class Instruction(NamedTuple):
    """One instruction of a computation."""

    shape: str  # of its result, as text
    name: str  # such as fusion
    rest: str  # operands and attributes


class Program(NamedTuple):
    """The computations of a compiled program."""

    lines: dict[str, list[Instruction]]
    text: dict[str, str]
    entry: str


class Counts(NamedTuple):
    """Number of kernels, convolutions and collectives in a part of a program."""

    kernels: int
    convolutions: int  # a TPU makes convolutions of matrix products too
    collectives: dict[str, int]
    megabytes: dict[str, float]  # of the whole arrays that these make, on a device
    # Loops of unknown length: in each of their iterations a GPU waits for the host.
    open_loops: int = 0
    # A TPU compiler's estimate; a loop of unknown length counts one iteration.
    cycles: int = 0
    # Of all kernels' results, and of these in a TPU's tiles
    written_mb: float = 0.0
    padded_mb: float = 0.0
    # Largest side of the window of a convolution of several groups
    grouped_window: int = 0


def parse(text: str) -> Program:
    """Parse the text of `Compiled.as_text()` into computations."""
    heads = list(HEAD.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    bodies = {h[2]: text[h.end() : end] for h, end in zip(heads, ends, strict=True)}
    lines = {
        name: [Instruction(*fields) for fields in LINE.findall(body)]
        for name, body in bodies.items()
    }
    (entry,) = [head[2] for head in heads if head[1]]
    return Program(lines, bodies, entry)


def count_program(program: Program, num_devices: int) -> Counts:
    """Count everything in a program."""
    return _counts(program, program.entry, num_devices)


def count_step(
    program: Program, num_devices: int, steps_per_loop: int = 1
) -> Counts | None:
    """Count one step; None if no loop with a convolution has an unknown trip count.

    Args:
      steps_per_loop: length of the counted loop in the loop's body; 1: there is none.
    """
    loops = [
        _find(BODY, line.rest)
        for lines in program.lines.values()
        for line in lines
        if line.name == "while" and _turns(program, line) is None
    ]
    if steps_per_loop > 1:
        loops = [
            _find(BODY, line.rest)
            for loop in loops
            for line in program.lines[loop]
            if line.name == "while" and _turns(program, line) == steps_per_loop
        ]
    steps = [_counts(program, body, num_devices) for body in loops]
    steps = [counts for counts in steps if counts.convolutions]
    # Of nested loops with as many convolutions the inner one is the step.
    return min(steps, key=lambda x: (-x.convolutions, x.kernels), default=None)


def _turns(program, line) -> int | None:
    """Trip count of a `while`; None if the compiler does not know it."""
    if count := _find(TURNS, line.rest):
        return int(count)
    condition = program.text.get(_find(CONDITION, line.rest), "")
    limits = CONSTANT.findall(condition)
    is_count = len(limits) == 1 and "direction=LT" in condition
    return int(limits[0]) if is_count else None


def _find(pattern: re.Pattern, text: str) -> str:
    """First group of a pattern; "" if the text has none."""
    found = pattern.search(text)
    return found[1] if found else ""


def _counts(program, name, num_devices) -> Counts:
    kinds, sizes, window = Counter(), defaultdict(float), 0
    for line, times, is_fused in _run(program, name):
        kind = line.name.removesuffix("-start")
        if not is_fused:
            kinds["cycles"] += times * _cycles(line)
        if kind in COLLECTIVES:
            kinds[kind] += times
            sizes[kind] += times * _bytes(line, kind, num_devices) / 1e6
        elif _is_convolution(line):
            kinds["convolutions"] += times
            window = max(window, _grouped_window(line))
        elif line.name == "while" and _turns(program, line) is None:
            kinds["open_loops"] += times
        if kind in KERNELS and not is_fused:
            kinds["kernels"] += times
            for shape in TILED.findall(line.shape):
                written, padded = _tiled_bytes(*shape)
                sizes["written"] += times * written / 1e6
                sizes["padded"] += times * padded / 1e6
    return Counts(
        kernels=kinds.pop("kernels", 0),
        convolutions=kinds.pop("convolutions", 0),
        open_loops=kinds.pop("open_loops", 0),
        cycles=kinds.pop("cycles", 0),
        written_mb=round(sizes.pop("written", 0.0), 3),
        padded_mb=round(sizes.pop("padded", 0.0), 3),
        grouped_window=window,
        collectives=dict(kinds),
        megabytes={kind: round(size, 6) for kind, size in sizes.items()},
    )


def _run(program, name, times=1, is_fused=False):
    """Yield (instruction, executions, whether within a kernel), calls included."""
    for line in program.lines.get(name, ()):
        yield line, times, is_fused
        turns = _turns(program, line) or 1 if line.name == "while" else 1
        within = is_fused or line.name == "fusion"
        if line.name in ("reduce", "sort", "scatter", "all-reduce", "reduce-scatter"):
            continue  # their computation is applied to each number
        for called in CALLS.findall(line.rest):
            for inner in called.split(", "):
                yield from _run(program, inner.strip("{% }"), times * turns, within)


def _is_convolution(line) -> bool:
    is_call = line.name == "custom-call" and "conv" in line.rest.partition("target=")[2]
    return line.name == "convolution" or is_call


def _cycles(line) -> int:
    """A kernel's estimated cycles; 0 of a loop, and where the compiler has none."""
    cycles = int(_find(CYCLES, line.rest) or 0)
    return cycles if line.name != "while" and cycles < UNKNOWN else 0


def _grouped_window(line) -> int:
    """Largest side of a convolution's window; 0 of one that has a single group."""
    is_grouped = int(_find(GROUPS, line.rest) or 1) > 1
    sides = _find(WINDOW, line.rest).split("x") if is_grouped else ()
    return max(map(int, filter(None, sides)), default=0)


def _tiled_bytes(kind, bits, shape, axes, tile) -> tuple[int, int]:
    """Bytes of an array, and of its tiles."""
    width = 1 if kind == "pred" else max(int(bits) // 8, 1)
    sizes, tile = _numbers(shape), _numbers(tile)[::-1]
    minor = [sizes[axis] for axis in _numbers(axes)] or sizes[::-1]
    tile += [1] * (len(minor) - len(tile))
    padded = [-(-n // t) * t for n, t in zip(minor, tile, strict=False)]
    return width * math.prod(sizes), width * math.prod(padded)


def _numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]


def _bytes(line, kind, num_devices) -> int:
    """Bytes of the unsharded arrays that a collective produces or sums."""
    shapes = [x for x in SHAPE.findall(line.shape) if x[2]]
    if line.name.endswith("-start"):  # operands first, then results
        shapes = shapes[len(shapes) // 2 :]
    size = 0
    for dtype, bits, shape in shapes:
        count = math.prod(map(int, shape.split(",")))
        size += count if dtype == "pred" else count * max(int(bits) // 8, 1)
    return size * num_devices if kind == "reduce-scatter" else size
