"""Cost of a traced program: memory, FLOPs, memory traffic.

XLA says the same of what it has compiled, which takes minutes for a large network; and
of what it has only lowered it counts a loop's body once and stores every result. So a
plan that must answer at once, for devices that are not there, has this estimate.

Fusion is modeled by one rule: an elementwise result is stored only if an operation that
cannot be fused needs it (a convolution, a product, a sort, a loop, an output); others
recompute it from stored values. Values live from there to their last use, in the
program's order. On a TPU they take whole tiles of 8 x 128 numbers (`tiled`). Not
modeled: the compiler's scheduling and workspaces of convolutions.

FLOPs are those of products and convolutions, of loop bodies times their turns.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from fedfr_jax.models.flops import count_flops_of_jaxpr, scan_sizes
from fedfr_jax.types import PyTree

# FUSED operations are recomputed by their users; all others store arrays.
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
READS_LITTLE = ("gather", "dynamic_slice")  # only a part of their operand
IN_PLACE = ("scatter", "dynamic_update_slice")  # overwrite their operand


class Kernel(NamedTuple):
    """A kernel that a device runs `times` times."""

    flops: float
    precision: str  # of the products: "bfloat16", "float32" or "highest"
    moved: float  # bytes read from memory and written to it
    sent: float  # bytes to other devices
    times: float = 1.0


class ProgramCost(NamedTuple):
    """Cost of a program on one device, without its arguments."""

    peak: float  # bytes
    kernels: list[Kernel]

    @property
    def flops(self) -> float:
        """FLOPs of products and convolutions."""
        return sum(x.flops * x.times for x in self.kernels)


class Value:
    """An array of the program, which may be fused away."""

    def __init__(self, aval, size=None):
        is_array = hasattr(aval, "dtype")  # and no token
        self.shape, self.dtype = (aval.shape, aval.dtype) if is_array else ((), None)
        self.whole = count_bytes(aval) if is_array else 0.0
        self.size = self.whole if size is None else size  # bytes on a device
        self.is_stored = self.is_argument = False
        # Stored values that it is computed from, if not stored
        self.roots: tuple[Value, ...] = ()
        self.last = -1  # number of the step that reads it last


class Step(NamedTuple):
    """An equation, after calls are inlined."""

    name: str
    ins: list[Value]
    outs: list[Value]
    flops: float = 0.0
    precision: str = "float32"
    sent: float = 0.0
    inner: ProgramCost | None = None  # of a loop or a branch
    turns: float = 1.0
    carried: Sequence[Value] = ()  # what a loop moves in place


def count_bytes(aval) -> float:
    """Bytes of an unsharded array; 8 for a PRNG key."""
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    size = 8 if is_key else aval.dtype.itemsize
    return float(math.prod(aval.shape) * size)


def on_device(x) -> float:
    """Bytes of an array, or ShapeDtypeStruct, on each of its devices."""
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return count_bytes(jax.ShapeDtypeStruct(shape, x.dtype))


def bytes_on_device(tree: PyTree) -> float:
    """Bytes of all leaves on each device."""
    return sum(map(on_device, jax.tree.leaves(tree)))


Padding = Callable[[Sequence[int], int], float]  # (shape, bytes of a number) -> ratio


def plain(shape: Sequence[int], width: int) -> float:
    """`Padding` of memory without tiles."""
    del shape, width
    return 1.0


def tiled(lanes: int) -> Padding:
    """`Padding` of a TPU's memory, in tiles of 8 x 128 numbers of four bytes.

    Of all pairs of axes, one along the 128 and one across, the compiler is taken to
    choose the one that fills most. Lanes whose last axes fill 128 together share tiles,
    see `convolutions.side_by_side`.
    """

    def padding(shape: Sequence[int], width: int) -> float:
        if len(shape) < 2 or not math.prod(shape):
            return 1.0
        beside = [n for n in range(1, 17) if lanes % n == 0 and n * shape[-1] <= 128]
        wide = *shape[:-1], shape[-1] * max(beside, default=1)
        pairs = itertools.permutations(range(len(shape)), 2)
        return min(_fill(wide[i], 128) * _fill(shape[j], 32 // width) for i, j in pairs)

    return padding


def _fill(size: int, unit: int) -> float:
    return -(-size // unit) * unit / size


def cost_of_steps(
    steps: list[Step], outs: list[Value], padding: Padding = plain
) -> ProgramCost:
    """Cost of a body's steps, with the results `outs`."""
    _mark_stored(steps)
    for value in outs:  # results live until the end
        for root in _stored(value):
            root.last = len(steps)
    return _simulate(steps, padding)


def _mark_stored(steps: list[Step]) -> None:
    """Mark the values that are stored, their sources, and their last use."""
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
            if not value.is_stored:
                value.roots = roots
        if step.name not in FUSED or any(x.is_stored for x in step.outs):
            for root in roots:
                root.last = number


def _stored(value: Value) -> tuple[Value, ...]:
    return (value,) if value.is_stored else value.roots


def _simulate(steps: list[Step], padding: Padding) -> ProgramCost:
    """Simulate the memory over the steps, and collect their kernels."""
    ending = {}

    def taken(value: Value) -> float:
        width = value.whole / max(math.prod(value.shape), 1)
        return value.size * padding(value.shape, min(max(int(width), 1), 4))

    kernels, alive, peak, used = [], {}, 0.0, 0.0
    for number, step in enumerate(steps):
        results = [x for x in step.outs if x.is_stored and not x.is_argument]
        if step.name.startswith(IN_PLACE) or step.carried:
            for value in step.carried or step.ins[:1]:
                if value.last == number and id(value) in alive:
                    used -= taken(alive.pop(id(value)))
        for value in results:
            if id(value) not in alive:
                alive[id(value)] = value
                used += taken(value)
                ending.setdefault(max(value.last, number), []).append(value)
        peak = max(peak, used + (step.inner.peak if step.inner else 0.0))
        for value in ending.pop(number, []):
            if id(value) in alive:
                used -= taken(alive.pop(id(value)))
        kernels += _kernels(step)
    return ProgramCost(peak, kernels)


def _kernels(step: Step) -> Iterable[Kernel]:
    """Kernels of a step; none if it is fused."""
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


# Calls that are inlined.
CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}
CALLS |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "shard_map"}
SHARED = {"psum": 2, "psum_invariant": 2, "pmax": 2, "pmin": 2}  # passes of a ring
SHARED |= {"all_gather": 1, "all_gather_invariant": 1, "reduce_scatter": 1}
SHARED |= {"all_to_all": 1, "ppermute": 1}


def program_cost(
    program: Jaxpr,
    *,
    sizes: Mapping[int, float] | None = None,
    loop_turns: float = 1.0,
    num_devices: int = 1,
    padding: Padding = plain,
) -> ProgramCost:
    """Estimate the cost of a program on one device.

    Args:
      sizes: {number of an argument: its bytes on a device}; others are whole.
      loop_turns: of `while` loops with products in them: local steps.
      num_devices: that take part in collectives.
      padding: of arrays that it computes.
    """
    sizes = sizes or {}
    arguments = [Value(v.aval, sizes.get(i)) for i, v in enumerate(program.invars)]
    return _Body([], num_devices, loop_turns, padding).cost(program, arguments)


class _Body(NamedTuple):
    """Steps of a program, or of a loop's body."""

    steps: list[Step]
    num_devices: int
    loop_turns: float
    padding: Padding

    def cost(self, jaxpr: Jaxpr, arguments: Sequence[Value] = ()) -> ProgramCost:
        """Cost of a body whose arguments are stored already."""
        arguments = arguments or [Value(v.aval) for v in jaxpr.invars]
        arguments = [*_consts(jaxpr), *arguments]
        for value in arguments:
            value.is_argument = value.is_stored = True
        outputs = self.flatten(jaxpr, arguments)
        return cost_of_steps(self.steps, outputs, self.padding)

    def inner(self, loop_turns: float) -> "_Body":
        """An empty body of a loop or a branch."""
        return self._replace(steps=[], loop_turns=loop_turns)

    def flatten(self, jaxpr: Jaxpr, arguments: Sequence[Value]) -> list[Value]:
        """Append the steps of a body; return its results."""
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], arguments, strict=True))

        def value_of(x):
            return Value(x.aval, 0.0) if isinstance(x, Literal) else values[x]

        for equation in jaxpr.eqns:
            outs = self.append(equation, [value_of(x) for x in equation.invars])
            values.update(zip(equation.outvars, outs, strict=True))
        return [value_of(x) for x in jaxpr.outvars]

    def append(self, equation: JaxprEqn, ins: list[Value]) -> list[Value]:
        """Append the step, or the steps, of an equation; return its results."""
        name, params = equation.primitive.name, equation.params
        if name in CALLS:
            body = next(iter(jaxprs_in_params(params)))
            inside = [_lookup(x, v.aval) for x, v in zip(ins, body.invars, strict=True)]
            return self.flatten(body, [*_consts(body), *inside])
        outs = [Value(x.aval) for x in equation.outvars]
        if name == "scan":
            consts, carries = scan_sizes(params)
            cost = self.loop(params["jaxpr"].jaxpr, ins[:consts], self.loop_turns)
            moved, turns = ins[consts : consts + carries], params["length"]
        elif name == "while":
            consts = params["cond_nconsts"], params["body_nconsts"]
            shared, moved = ins[consts[0] : sum(consts)], ins[sum(consts) :]
            cost = self.loop(params["body_jaxpr"].jaxpr, shared, 1.0)
            # Others do little: searches, and walks of a permutation.
            turns = self.loop_turns if cost.flops else 1.0
        elif name == "cond":
            branches = [
                self.inner(self.loop_turns).cost(x.jaxpr) for x in params["branches"]
            ]
            cost = max(branches, key=lambda x: (x.flops, x.peak))
            cost = cost._replace(peak=max(x.peak for x in branches))
            moved, turns = (), 1.0
        else:
            for out in outs:
                out.size = _size(equation, ins, out)
            sent = _sent_bytes(name, ins, outs, self.num_devices)
            flops, precision = count_flops_of_jaxpr(equation), _precision(equation)
            self.steps.append(Step(name, ins, outs, flops, precision, sent))
            return outs
        self.steps.append(Step(name, ins, outs, inner=cost, turns=turns, carried=moved))
        return outs

    def loop(self, body: Jaxpr, shared: list[Value], turns: float) -> ProgramCost:
        """Cost of a loop's body, whose first arguments are the `shared` ones."""
        inside = [Value(v.aval) for v in body.invars]
        for value, outer in zip(inside, shared, strict=False):
            value.size = outer.size
        return self.inner(turns).cost(body, inside)


def _consts(body: Jaxpr) -> list[Value]:
    return [Value(v.aval) for v in body.constvars]


def _lookup(value: Value, aval) -> Value:
    """A value as seen within a call; within a shard_map, a device's shard."""
    local = Value(aval)
    if local.shape == value.shape:
        return value
    local.roots = (value,)
    return local


def _size(equation: JaxprEqn, ins: list[Value], out: Value) -> float:
    """Bytes of a result on a device: sharded like its operands of the same shape."""
    if equation.primitive.name == "sharding_constraint":
        shape = equation.params["sharding"].shard_shape(out.shape)
        return count_bytes(jax.ShapeDtypeStruct(shape, out.dtype))
    same = [x.size / x.whole for x in ins if x.shape == out.shape and x.size]
    return out.whole * min(same, default=1.0)


def _precision(equation: JaxprEqn) -> str:
    dtype = Value(equation.invars[0].aval).dtype if equation.invars else None
    if dtype is not None and dtype.itemsize <= 2:
        return "bfloat16"
    requested = equation.params.get("precision")
    highest = jax.lax.Precision.HIGHEST
    precisions = requested if isinstance(requested, tuple) else (requested,)
    return "highest" if highest in precisions else "float32"


def _sent_bytes(name, ins, outs, num_devices) -> float:
    """Bytes that a device sends in a collective, by a ring algorithm."""
    if name == "sharding_constraint":
        return max(outs[0].size - ins[0].size, 0.0)
    if num_devices == 1 or name not in SHARED:
        return 0.0
    size = max(sum(x.size for x in ins), sum(x.size for x in outs))
    return SHARED[name] * size * (num_devices - 1) / num_devices
