"""The steps of a program: which of their results exist, and for how long.

One rule for what the compiler fuses: what is computed element by element exists only
where something that cannot be fused needs it (a convolution, a product, a sort, a loop,
a result); everybody else computes it again from what exists. Values live from there to
their last use, in the program's order. What the rule leaves out: the compiler's own
order, workspaces of convolutions and padding of layouts.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax

# Computed where it is asked for; all others make arrays.
REDUCES = ("reduce_", "argmax", "argmin")
FUSED = set(
    "abs acos acosh add and asin asinh atan atan2 atanh bitcast_convert_type "
    "broadcast_in_dim cbrt ceil clamp concatenate convert_element_type copy cos cosh "
    "div eq erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt integer_pow iota "
    "is_finite le log log1p logistic lt max min mul name ne neg nextafter not "
    "optimization_barrier or pad population_count pow pvary random_bits random_fold_in "
    "random_split random_unwrap random_wrap real reduce_precision rem reshape rev "
    "round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign "
    "sin sinh slice split sqrt square squeeze stop_gradient sub tan tanh threefry2x32 "
    "transpose xor copy_p pcast sharding_constraint".split()
)
READS_LITTLE = ("gather", "dynamic_slice")  # of their operand
IN_PLACE = ("scatter", "dynamic_update_slice")  # take their operand's place


class Kernel(NamedTuple):
    """Something that a device does, `times` times."""

    flops: float
    precision: str  # of the products: "bfloat16", "float32" or "highest"
    moved: float  # bytes read from memory and written to it
    sent: float  # bytes to other devices
    times: float = 1.0


class Taken(NamedTuple):
    """What a program takes of one device, its arguments aside."""

    peak: float  # bytes
    kernels: list[Kernel]
    largest: list[tuple[str, float]]  # (what it is, bytes) of the peak, falling
    is_whole: bool  # whether the turns of all loops were known

    @property
    def flops(self) -> float:
        """Of products and convolutions."""
        return sum(x.flops * x.times for x in self.kernels)


class Value:
    """An array of the program, or what would be one."""

    def __init__(self, aval, size=None, known=None, is_stored=False, what=""):
        is_array = hasattr(aval, "dtype")  # and no token
        self.shape, self.dtype = (aval.shape, aval.dtype) if is_array else ((), None)
        self.whole = bytes_of(aval) if is_array else 0.0
        self.size = self.whole if size is None else size  # bytes on a device
        self.known = known
        self.is_stored, self.what = is_stored, what
        self.is_argument = False
        self.roots = ()  # stored values that it is computed from, if not stored
        self.last = -1  # number of the step that reads it last


class Step(NamedTuple):
    """An equation, after calls are taken apart."""

    name: str
    ins: list[Value]
    outs: list[Value]
    flops: float = 0.0
    precision: str = "float32"
    sent: float = 0.0
    inner: Taken | None = None  # of a loop or a branch
    turns: float = 1.0
    carried: Sequence[Value] = ()  # what a loop moves in place


def bytes_of(aval) -> float:
    """Of a whole array; keys of random numbers have 8."""
    is_key = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)
    size = 8 if is_key else aval.dtype.itemsize
    return float(math.prod(aval.shape) * size)


def taken_by(steps: list[Step], outs: list[Value], is_whole: bool) -> Taken:
    """What a body's steps take, `outs` being its results.

    Args:
      is_whole: whether the turns of all loops were known.
    """
    _settle(steps)
    for value in outs:  # results wait for the end
        for root in _stored(value):
            root.last = len(steps)
    return _played(steps, is_whole)


def _settle(steps: list[Step]) -> None:
    """Say what is stored, what others are computed from, and who reads it last."""
    for step in steps:
        if step.name in FUSED:
            continue
        for value in step.outs:
            value.is_stored = True
        if not step.name.startswith(REDUCES):
            for value in step.ins:
                value.is_stored |= not value.roots
    for number, step in enumerate(steps):
        roots = tuple({id(r): r for x in step.ins for r in _stored(x)}.values())
        for value in step.outs:
            value.what = value.what or f"{step.name} {value.dtype}{list(value.shape)}"
            if not value.is_stored:
                value.roots = roots
        if step.name not in FUSED or any(x.is_stored for x in step.outs):
            for root in roots:
                root.last = number


def _stored(value: Value) -> tuple[Value, ...]:
    return (value,) if value.is_stored else value.roots


def _played(steps: list[Step], is_whole: bool) -> Taken:
    """Memory over the steps, and what they do."""
    ending = {}
    kernels, alive, peak = [], {}, (0.0, [])
    now = 0.0
    for number, step in enumerate(steps):
        made = [x for x in step.outs if x.is_stored and not x.is_argument]
        if step.name.startswith(IN_PLACE) or step.carried:
            for value in step.carried or step.ins[:1]:
                if value.last == number and id(value) in alive:
                    now -= alive.pop(id(value)).size
        for value in made:
            if id(value) not in alive:
                alive[id(value)] = value
                now += value.size
                ending.setdefault(max(value.last, number), []).append(value)
        inside = step.inner.peak if step.inner else 0.0
        if now + inside > peak[0]:
            held = [(x.what, x.size) for x in alive.values()]
            held += step.inner.largest if step.inner else []
            peak = now + inside, sorted(held, key=lambda x: -x[1])[:8]
        for value in ending.pop(number, []):
            if id(value) in alive:
                now -= alive.pop(id(value)).size
        kernels += _kernels(step)
    return Taken(peak[0], kernels, peak[1], is_whole)


def _kernels(step: Step) -> Iterable[Kernel]:
    """What a device does for a step; nothing where it is fused."""
    if step.inner:
        turns = step.turns
        return [x._replace(times=x.times * turns) for x in step.inner.kernels]
    is_fused = step.name in FUSED and not any(x.is_stored for x in step.outs)
    if is_fused and not step.sent:
        return []
    written = sum(x.size for x in step.outs)
    read = sum({id(r): r.size for x in step.ins for r in _stored(x)}.values())
    if step.name in READS_LITTLE:
        read = written
    if step.name.startswith(IN_PLACE):
        read = written = sum(x.size for x in step.ins[1:])
    return [Kernel(step.flops, step.precision, read + written, step.sent)]
