"""Cost of a traced program: memory, FLOPs, memory traffic.

Fusion is modeled by one rule: an elementwise result is stored only if an operation that
cannot be fused needs it (a convolution, a product, a sort, a loop, an output); others
recompute it from stored values. Values live from there to their last use, in the
program's order. Not modeled: the compiler's scheduling, workspaces of convolutions and
padding of layouts.

The program is a jaxpr, so nothing is compiled. FLOPs are exact: products and
convolutions, loop bodies times their trip counts, where these are known.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from fedfr_jax.models.flops import count_flops_of_jaxpr, scan_sizes

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
    largest: list[tuple[str, float]]  # (description, bytes) at the peak, descending
    is_whole: bool  # whether the lengths of all loops were known

    @property
    def flops(self) -> float:
        """FLOPs of products and convolutions."""
        return sum(x.flops * x.times for x in self.kernels)


class Value:
    """An array of the program, which may be fused away."""

    def __init__(self, aval, size=None, known=None):
        is_array = hasattr(aval, "dtype")  # and no token
        self.shape, self.dtype = (aval.shape, aval.dtype) if is_array else ((), None)
        self.whole = count_bytes(aval) if is_array else 0.0
        self.size = self.whole if size is None else size  # bytes on a device
        self.known = known
        self.is_stored, self.name = False, ""
        self.is_argument = False
        self.roots = ()  # stored values that it is computed from, if not stored
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
    is_key = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)
    size = 8 if is_key else aval.dtype.itemsize
    return float(math.prod(aval.shape) * size)


def cost_of_steps(steps: list[Step], outs: list[Value], is_whole: bool) -> ProgramCost:
    """Cost of a body's steps, with the results `outs`.

    Args:
      is_whole: whether the lengths of all loops were known.
    """
    _mark_stored(steps)
    for value in outs:  # results live until the end
        for root in _stored(value):
            root.last = len(steps)
    return _simulate(steps, is_whole)


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
            value.name = value.name or f"{step.name} {value.dtype}{list(value.shape)}"
            if not value.is_stored:
                value.roots = roots
        if step.name not in FUSED or any(x.is_stored for x in step.outs):
            for root in roots:
                root.last = number


def _stored(value: Value) -> tuple[Value, ...]:
    return (value,) if value.is_stored else value.roots


def _simulate(steps: list[Step], is_whole: bool) -> ProgramCost:
    """Simulate the memory over the steps, and collect their kernels."""
    ending = {}
    kernels, alive, peak = [], {}, (0.0, [])
    used = 0.0
    for number, step in enumerate(steps):
        results = [x for x in step.outs if x.is_stored and not x.is_argument]
        if step.name.startswith(IN_PLACE) or step.carried:
            for value in step.carried or step.ins[:1]:
                if value.last == number and id(value) in alive:
                    used -= alive.pop(id(value)).size
        for value in results:
            if id(value) not in alive:
                alive[id(value)] = value
                used += value.size
                ending.setdefault(max(value.last, number), []).append(value)
        inside = step.inner.peak if step.inner else 0.0
        if used + inside > peak[0]:
            largest = [(x.name, x.size) for x in alive.values()]
            largest += step.inner.largest if step.inner else []
            peak = used + inside, sorted(largest, key=lambda x: -x[1])[:8]
        for value in ending.pop(number, []):
            if id(value) in alive:
                used -= alive.pop(id(value)).size
        kernels += _kernels(step)
    return ProgramCost(peak[0], kernels, peak[1], is_whole)


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
MAX_KNOWN = 16  # numbers of an array whose values are followed


def program_cost(
    program: ClosedJaxpr,
    *,
    sizes: Mapping[int, float] | None = None,
    known: Mapping[int, Any] | None = None,
    num_devices: int = 1,
) -> ProgramCost:
    """Estimate the cost of a program on one device.

    Args:
      sizes: {number of an argument: its bytes on a device}; others are whole.
      known: {number of an argument: its value}, of small integers, from which the
        lengths of loops follow.
      num_devices: that take part in collectives.
    """
    sizes, known = sizes or {}, known or {}
    arguments = [
        Value(v.aval, sizes.get(i), known.get(i))
        for i, v in enumerate(program.jaxpr.invars)
    ]
    return _body_steps(
        program.jaxpr, [*_consts(program.jaxpr), *arguments], num_devices
    )


def _consts(body: Jaxpr) -> list[Value]:
    return [Value(v.aval) for v in body.constvars]


def _body_steps(jaxpr: Jaxpr, arguments: list[Value], num_devices: int) -> ProgramCost:
    """Cost of a body whose arguments [constvars, invars] are stored already."""
    steps, is_whole = [], [True]
    for value in arguments:
        value.is_argument = value.is_stored = True
    outs = _flatten(jaxpr, arguments, steps, num_devices, is_whole)
    return cost_of_steps(steps, outs, is_whole[0])


def _flatten(jaxpr, arguments, steps, num_devices, is_whole) -> list[Value]:
    """Append a body's steps; return its results."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], arguments, strict=True))

    def value_of(x):
        if isinstance(x, Literal):
            return Value(x.aval, 0.0, x.val if np.size(x.val) <= MAX_KNOWN else None)
        return values[x]

    for equation in jaxpr.eqns:
        ins = [value_of(x) for x in equation.invars]
        outs = _equation_steps(equation, ins, steps, num_devices, is_whole)
        values.update(zip(equation.outvars, outs, strict=True))
    return [value_of(x) for x in jaxpr.outvars]


def _equation_steps(equation, ins, steps, num_devices, is_whole) -> list[Value]:
    name = equation.primitive.name
    if name in CALLS:
        (body,) = list(jaxprs_in_params(equation.params))[:1]
        inside = [_lookup(x, v.aval) for x, v in zip(ins, body.invars, strict=True)]
        return _flatten(body, [*_consts(body), *inside], steps, num_devices, is_whole)
    if name in ("scan", "while", "cond"):
        return LOOPS[name](equation, ins, steps, num_devices, is_whole)
    outs = [Value(x.aval, _size(name, equation, ins, x.aval)) for x in equation.outvars]
    _follow(equation, ins, outs)
    sent = _sent_bytes(name, ins, outs, num_devices)
    flops = count_flops_of_jaxpr(equation)
    steps.append(Step(name, ins, outs, flops, _precision(equation), sent))
    return outs


def _lookup(value: Value, aval) -> Value:
    """A value as seen within a call; within a shard_map, a device's shard."""
    local = Value(aval)
    if local.shape == value.shape:
        return value
    local.roots = (value,)
    return local


def _size(name, equation, ins, aval) -> float:
    """Bytes of a result on a device: sharded like its operands of the same shape."""
    if name == "sharding_constraint":
        shape = equation.params["sharding"].shard_shape(aval.shape)
        return count_bytes(jax.ShapeDtypeStruct(shape, aval.dtype))
    out = Value(aval)
    same = [x.size / x.whole for x in ins if x.shape == out.shape and x.size]
    return out.whole * min(same, default=1.0)


def _follow(equation, ins, outs) -> None:
    """Evaluate small integers, to know the trip counts of loops."""
    if any(x.known is None for x in ins):
        return
    if equation.primitive.name not in (*FUSED, "while"):
        return

    def is_small(x):
        is_whole = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_
        return is_whole and math.prod(x.shape) <= MAX_KNOWN

    if not ins or not all(map(is_small, outs)):
        return
    values = equation.primitive.bind(*(x.known for x in ins), **equation.params)
    values = values if equation.primitive.multiple_results else [values]
    for out, value in zip(outs, values, strict=True):
        out.known = jax.device_get(value)


def _precision(equation: JaxprEqn) -> str:
    dtype = equation.invars[0].aval.dtype if equation.invars else None
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


def _scan(equation, ins, steps, num_devices, is_whole):
    body, p = equation.params["jaxpr"].jaxpr, equation.params
    consts, carries = scan_sizes(p)
    inside = [Value(v.aval, known=None) for v in body.invars]
    for inner, outer in zip(inside[:consts], ins[:consts], strict=True):
        inner.known, inner.size = outer.known, outer.size
    cost = _body_steps(body, [*_consts(body), *inside], num_devices)
    is_whole[0] &= cost.is_whole
    outs = [Value(x.aval) for x in equation.outvars]
    moved = ins[consts : consts + carries]
    steps.append(Step("scan", ins, outs, inner=cost, turns=p["length"], carried=moved))
    return outs


def _while(equation, ins, steps, num_devices, is_whole):
    p = equation.params
    body, test = p["body_jaxpr"].jaxpr, p["cond_jaxpr"].jaxpr
    skip, consts = p["cond_nconsts"], p["body_nconsts"]
    moved = ins[skip + consts :]
    outs = [Value(x.aval) for x in equation.outvars]
    _follow(equation, ins, outs)
    if outs and all(x.known is not None for x in outs):
        return outs
    turns = _turns(test, body, ins[:skip], consts, moved)
    inside = [Value(v.aval) for v in body.invars]
    for inner, outer in zip(inside[:consts], ins[skip : skip + consts], strict=True):
        inner.known, inner.size = outer.known, outer.size
    for i, (inner, outer) in enumerate(zip(inside[consts:], moved, strict=True)):
        if body.outvars[i] is body.invars[consts + i]:
            inner.known = outer.known
    cost = _body_steps(body, [*_consts(body), *inside], num_devices)
    # Others do little: searches, and walks of a permutation.
    is_whole[0] &= cost.is_whole and (turns is not None or not cost.flops)
    count = 1.0 if turns is None else turns
    steps.append(Step("while", ins, outs, inner=cost, turns=count, carried=moved))
    return outs


def _turns(test, body, test_consts, consts, moved) -> float | None:
    """Trip count of a loop that counts up to a number; None if unknown."""
    values = dict(zip(test.invars, [*test_consts, *moved], strict=True))
    position_of = {v: i for i, v in enumerate(test.invars[len(test_consts) :])}
    last = next((e for e in test.eqns if test.outvars[0] in e.outvars), None)
    if last is None or last.primitive.name != "lt":
        return None
    counter, limit = last.invars
    if counter not in position_of or len(test.eqns) != 1:
        return None
    position = position_of[counter]
    added = next((e for e in body.eqns if body.outvars[position] in e.outvars), None)
    if added is None or added.primitive.name != "add":
        return None
    steps = [x.val for x in added.invars if isinstance(x, Literal)]
    start = values[counter].known
    end = limit.val if isinstance(limit, Literal) else values[limit].known
    if len(steps) != 1 or start is None or end is None:
        return None
    return float(max(-(-(int(end) - int(start)) // int(steps[0])), 0))


def _cond(equation, ins, steps, num_devices, is_whole):
    branches = [x.jaxpr for x in equation.params["branches"]]
    index = ins[0].known
    if index is not None:
        body = branches[int(index)]
        return _flatten(body, [*_consts(body), *ins[1:]], steps, num_devices, is_whole)
    costs = []
    for body in branches:
        inside = [Value(v.aval) for v in body.invars]
        costs.append(_body_steps(body, [*_consts(body), *inside], num_devices))
    cost = max(costs, key=lambda x: (x.flops, x.peak))
    cost = cost._replace(peak=max(x.peak for x in costs))
    is_whole[0] &= cost.is_whole
    outs = [Value(x.aval) for x in equation.outvars]
    steps.append(Step("cond", ins, outs, inner=cost))
    return outs


LOOPS = {"scan": _scan, "while": _while, "cond": _cond}
