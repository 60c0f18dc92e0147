"""What a traced program takes of one device: memory, operations, traffic.

The program is a jaxpr, so nothing is compiled. Operations are exact: products and
convolutions, bodies of loops times their turns, where the turns are known. Memory and
traffic are those of `steps`.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from fedfr_jax.models.flops import flops_of, scan_sizes
from fedfr_jax.plan.steps import FUSED, Step, Taken, Value, bytes_of, taken_by

# Calls whose body is taken as if it stood there.
CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}
CALLS |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "shard_map"}
SHARED = {"psum": 2, "psum_invariant": 2, "pmax": 2, "pmin": 2}  # passes of a ring
SHARED |= {"all_gather": 1, "all_gather_invariant": 1, "reduce_scatter": 1}
SHARED |= {"all_to_all": 1, "ppermute": 1}
MOST_KNOWN = 16  # numbers of an array whose values are followed


def taken(
    program: ClosedJaxpr,
    *,
    sizes: Mapping[int, float] | None = None,
    known: Mapping[int, Any] | None = None,
    num_devices: int = 1,
) -> Taken:
    """What a program takes of one device.

    Args:
      sizes: {number of an argument: its bytes on a device}; others are whole.
      known: {number of an argument: its value}, of small whole numbers, from which the
        turns of loops follow.
      num_devices: that sums go over.
    """
    sizes, known = sizes or {}, known or {}
    arguments = [
        Value(v.aval, sizes.get(i), known.get(i))
        for i, v in enumerate(program.jaxpr.invars)
    ]
    return _of_body(program.jaxpr, [*_consts(program.jaxpr), *arguments], num_devices)


def _consts(body: Jaxpr) -> list[Value]:
    return [Value(v.aval) for v in body.constvars]


def _of_body(jaxpr: Jaxpr, given: list[Value], num_devices: int) -> Taken:
    """Of a body whose arguments [constvars, invars] exist already."""
    steps, is_whole = [], [True]
    for value in given:
        value.is_argument = value.is_stored = True
    outs = _flatten(jaxpr, given, steps, num_devices, is_whole)
    return taken_by(steps, outs, is_whole[0])


def _flatten(jaxpr, given, steps, num_devices, is_whole) -> list[Value]:
    """Append the steps of a body; -> its results."""
    found = dict(zip([*jaxpr.constvars, *jaxpr.invars], given, strict=True))

    def value_of(x):
        if isinstance(x, Literal):
            return Value(x.aval, 0.0, x.val if np.size(x.val) <= MOST_KNOWN else None)
        return found[x]

    for equation in jaxpr.eqns:
        ins = [value_of(x) for x in equation.invars]
        outs = _of_equation(equation, ins, steps, num_devices, is_whole)
        found.update(zip(equation.outvars, outs, strict=True))
    return [value_of(x) for x in jaxpr.outvars]


def _of_equation(equation, ins, steps, num_devices, is_whole) -> list[Value]:
    name = equation.primitive.name
    if name in CALLS:
        (body,) = list(jaxprs_in_params(equation.params))[:1]
        inside = [_seen(x, v.aval) for x, v in zip(ins, body.invars, strict=True)]
        return _flatten(body, [*_consts(body), *inside], steps, num_devices, is_whole)
    if name in ("scan", "while", "cond"):
        return LOOPS[name](equation, ins, steps, num_devices, is_whole)
    outs = [Value(x.aval, _size(name, equation, ins, x.aval)) for x in equation.outvars]
    _follow(equation, ins, outs)
    sent = _sent(name, ins, outs, num_devices)
    flops = flops_of(equation)
    steps.append(Step(name, ins, outs, flops, _precision(equation), sent))
    return outs


def _seen(value: Value, aval) -> Value:
    """A value as a call sees it: of a shard_map, a device's own part."""
    part = Value(aval)
    if part.shape == value.shape:
        return value
    part.roots = (value,)
    return part


def _size(name, equation, ins, aval) -> float:
    """Bytes of a result on a device: cut as its operands of the same shape are."""
    if name == "sharding_constraint":
        shape = equation.params["sharding"].shard_shape(aval.shape)
        return bytes_of(jax.ShapeDtypeStruct(shape, aval.dtype))
    out = Value(aval)
    same = [x.size / x.whole for x in ins if x.shape == out.shape and x.size]
    return out.whole * min(same, default=1.0)


def _follow(equation, ins, outs) -> None:
    """Small whole numbers, for the turns of loops."""
    if any(x.known is None for x in ins):
        return
    if equation.primitive.name not in (*FUSED, "while"):
        return
    is_small = lambda x: (
        math.prod(x.shape) <= MOST_KNOWN
        and (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_)
    )
    if not ins or not all(map(is_small, outs)):
        return
    values = equation.primitive.bind(*(x.known for x in ins), **equation.params)
    values = values if equation.primitive.multiple_results else [values]
    for out, value in zip(outs, values, strict=True):
        out.known = jax.device_get(value)


def _precision(equation: JaxprEqn) -> str:
    kind = equation.invars[0].aval.dtype if equation.invars else None
    if kind is not None and kind.itemsize <= 2:
        return "bfloat16"
    asked = equation.params.get("precision")
    highest = jax.lax.Precision.HIGHEST
    is_highest = asked == highest or isinstance(asked, tuple) and highest in asked
    return "highest" if is_highest else "float32"


def _sent(name, ins, outs, num_devices) -> float:
    """Bytes that a device sends, in a ring of all."""
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
    found = _of_body(body, [*_consts(body), *inside], num_devices)
    is_whole[0] &= found.is_whole
    outs = [Value(x.aval) for x in equation.outvars]
    moved = ins[consts : consts + carries]
    steps.append(Step("scan", ins, outs, inner=found, turns=p["length"], carried=moved))
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
    found = _of_body(body, [*_consts(body), *inside], num_devices)
    # Others do little: searches, and walks of a permutation.
    is_whole[0] &= found.is_whole and (turns is not None or not found.flops)
    count = 1.0 if turns is None else turns
    steps.append(Step("while", ins, outs, inner=found, turns=count, carried=moved))
    return outs


def _turns(test, body, told, consts, moved) -> float | None:
    """Of a loop that counts up to a number; None where that is not to be seen."""
    known = dict(zip(test.invars, [*told, *moved], strict=True))
    places = {v: i for i, v in enumerate(test.invars[len(told) :])}
    last = next((e for e in test.eqns if test.outvars[0] in e.outvars), None)
    if last is None or last.primitive.name != "lt":
        return None
    counter, limit = last.invars
    if counter not in places or len(test.eqns) != 1:
        return None
    place = places[counter]
    added = next((e for e in body.eqns if body.outvars[place] in e.outvars), None)
    if added is None or added.primitive.name != "add":
        return None
    by = [x.val for x in added.invars if isinstance(x, Literal)]
    start = known[counter].known
    end = limit.val if isinstance(limit, Literal) else known[limit].known
    if len(by) != 1 or start is None or end is None:
        return None
    return float(max(-(-(int(end) - int(start)) // int(by[0])), 0))


def _cond(equation, ins, steps, num_devices, is_whole):
    branches = [x.jaxpr for x in equation.params["branches"]]
    index = ins[0].known
    if index is not None:
        body = branches[int(index)]
        return _flatten(body, [*_consts(body), *ins[1:]], steps, num_devices, is_whole)
    every = []
    for body in branches:
        inside = [Value(v.aval) for v in body.invars]
        every.append(_of_body(body, [*_consts(body), *inside], num_devices))
    found = max(every, key=lambda x: (x.flops, x.peak))
    found = found._replace(peak=max(x.peak for x in every))
    is_whole[0] &= found.is_whole
    outs = [Value(x.aval) for x in equation.outvars]
    steps.append(Step("cond", ins, outs, inner=found))
    return outs


LOOPS = {"scan": _scan, "while": _while, "cond": _cond}
