"""JAX's operations as those of ONNX, see `graph`."""

import numpy as np

from fedfr_jax.deploy.graph import (
    BATCH,
    TO_FIRST,
    Graph,
    Pending,
    Tensor,
    Value,
    affine,
    made,
    per_channel,
    walk,
)
from fedfr_jax.deploy.layers import STRUCTURAL, broadcast
from fedfr_jax.models.flops import scan_sizes

# Number by number, broadcast as NumPy does.
PLAIN = {
    "add": "Add",
    "add_any": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "max": "Max",
    "min": "Min",
    "pow": "Pow",
    "neg": "Neg",
    "exp": "Exp",
    "log": "Log",
    "tanh": "Tanh",
    "logistic": "Sigmoid",
    "erf": "Erf",
    "sqrt": "Sqrt",
    "abs": "Abs",
    "sign": "Sign",
    "floor": "Floor",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
    "lt": "Less",
    "le": "LessOrEqual",
    "eq": "Equal",
    "and": "And",
    "or": "Or",
    "not": "Not",
}
SAME = (
    "stop_gradient",
    "copy",
    "copy_p",
    "name",
    "optimization_barrier",
    "sharding_constraint",
)
CALLS = ("pjit", "jit", "closed_call", "core_call", "remat", "remat2", "checkpoint")
CALLS += ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def translate(graph: Graph, eqn, inputs: list[Value]) -> list[Value]:
    """Values of an equation's outputs; constants when all its inputs are.

    Raises:
      ValueError: for an operation that is not known here, or over the batch.
    """
    name, params = eqn.primitive.name, eqn.params
    if name in CALLS:
        return _call(graph, params, inputs)
    if name == "scan":
        return _scan(graph, params, inputs)
    shape = eqn.outvars[0].aval.shape
    is_constant = all(isinstance(x, np.ndarray) for x in inputs)
    if name == "broadcast_in_dim":
        return [broadcast(graph, inputs[0], shape, params["broadcast_dimensions"])]
    if is_constant and BATCH not in shape:
        found = eqn.primitive.bind(*inputs, **params)
        several = found if eqn.primitive.multiple_results else [found]
        return [np.asarray(x) for x in several]
    if name in SAME:
        return inputs
    if name in ("add", "sub", "mul", "div"):
        absorbed = _absorbed(graph, name, *inputs)
        if absorbed is not None:
            return [absorbed]
    inputs = [made(graph, x) for x in inputs]
    if name in PLAIN or name in COMPOSED:
        return [_elementwise(graph, name, params, inputs, shape)]
    if name not in STRUCTURAL:
        raise ValueError(
            f"network must be made of operations that can be exported, got {name}."
        )
    return [STRUCTURAL[name](graph, name, params, inputs, shape)]


def _call(graph, params, inputs):
    inner = params.get("call_jaxpr", params.get("jaxpr"))
    is_closed = hasattr(inner, "consts")
    jaxpr, consts = (inner.jaxpr, inner.consts) if is_closed else (inner, [])
    name = jaxpr.debug_info.func_name.partition(" ")[0]
    if name == "prelu" and isinstance(inputs[1], np.ndarray):
        x = made(graph, inputs[0])
        slope = inputs[1].reshape((-1, 1, 1) if x.is_first else (-1,))
        return [graph.add("PRelu", [x, slope], x.shape, x.is_first)]
    return walk(graph, jaxpr, list(map(np.asarray, consts)), inputs)


def _scan(graph, params, inputs):
    """The rounds of a loop, one after the other."""
    closed, length = params["jaxpr"], params["length"]
    num_consts, num_carry = scan_sizes(params)
    consts, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
    rows = inputs[num_consts + num_carry :]
    if params["reverse"] or len(closed.jaxpr.outvars) > num_carry:
        raise ValueError("a loop must run forward and keep nothing, got another.")
    for i in range(length):
        here = [x[i] for x in rows]
        given = [*consts, *carry, *here]
        carry = walk(graph, closed.jaxpr, list(map(np.asarray, closed.consts)), given)
        carry = [made(graph, x) for x in carry]
    return carry


def _absorbed(graph: Graph, name: str, x: Value, y: Value) -> Pending | None:
    """x and y, one of which is a number per channel, as something pending."""
    if isinstance(x, np.ndarray) and name in ("add", "mul"):
        x, y = y, x
    if isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
        return None
    vector = per_channel(y, x.shape)
    is_number = y.dtype == np.float32 and len(x.shape) in (2, 4)
    if vector is None or not is_number or x.shape[0] == 1:
        return None
    base = x if isinstance(x, Pending) else affine(graph, x)
    if name in ("mul", "div"):
        by = vector if name == "mul" else 1 / vector
        return base._replace(scale=base.scale * by, shift=base.shift * by)
    by = vector if name == "add" else -vector
    return base._replace(shift=base.shift + by)


def _elementwise(graph, name, params, inputs, shape) -> Tensor:
    is_first = len(shape) == 4 and any(
        isinstance(x, Tensor) and x.is_first for x in inputs
    )
    given = [_as_first(graph, x) if is_first else x for x in inputs]
    if name in COMPOSED:
        return COMPOSED[name](graph, params, given, shape, is_first)
    return graph.add(PLAIN[name], given, shape, is_first)


def _as_first(graph, x):
    if isinstance(x, Tensor):
        return graph.first(x)
    return x.transpose(TO_FIRST) if x.ndim == 4 else x


def _where(graph, params, inputs, shape, is_first):
    which, if_not, if_so = inputs
    return graph.add("Where", [which, if_so, if_not], shape, is_first)


def _rsqrt(graph, params, inputs, shape, is_first):
    root = graph.add("Sqrt", inputs, shape, is_first)
    return graph.add("Reciprocal", [root], shape, is_first)


def _power(graph, params, inputs, shape, is_first):
    by = np.asarray(params.get("y", 2), np.float32)
    return graph.add("Pow", [*inputs, by], shape, is_first)


def _clamp(graph, params, inputs, shape, is_first):
    low, x, high = inputs
    x = graph.add("Max", [x, low], shape, is_first)
    return graph.add("Min", [x, high], shape, is_first)


def _cast(graph, params, inputs, shape, is_first):
    to = np.dtype(params["new_dtype"])
    return graph.add("Cast", inputs, shape, is_first, to=to)


def _unequal(graph, params, inputs, shape, is_first):
    equal = graph.add("Equal", inputs, shape, is_first)
    return graph.add("Not", [equal], shape, is_first)


COMPOSED = {
    "select_n": _where,
    "rsqrt": _rsqrt,
    "integer_pow": _power,
    "square": _power,
    "clamp": _clamp,
    "convert_element_type": _cast,
    "ne": _unequal,
}
