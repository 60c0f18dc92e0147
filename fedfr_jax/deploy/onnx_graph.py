"""ONNX graphs from traced models, and their files.

Building a graph does not need the package onnx, writing it does.

The trace (a jaxpr) is walked once. Values that do not depend on the images are computed
and become constants. A number per channel that is multiplied or added after a
convolution or a linear layer is absorbed into its weights, which removes batch
normalization. Maps are [B, C, H, W] in the graph after a convolution, [B, H, W, C] in
the trace.
"""

import hashlib
import pathlib
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

from fedfr_jax.models.flops import scan_sizes

# Batch size of the trace, a prime that is no other size in a network: in a shape it
# marks the batch axis. With a symbolic size JAX gathers where it could slice.
BATCH = 7919
TO_FIRST, TO_LAST = (0, 3, 1, 2), (0, 2, 3, 1)  # transpositions of a map


class Node(NamedTuple):
    """An ONNX operation with one output."""

    kind: str
    inputs: tuple[str, ...]
    output: str
    settings: dict[str, Any]


class Tensor(NamedTuple):
    """Output of a node."""

    name: str
    shape: tuple  # as in the trace; 1 where it is still to be broadcast
    is_first: bool = False  # a map whose channels come first in the graph


class LazyAffine(NamedTuple):
    """scale [C] times a tensor plus shift [C], added to the graph when it is needed."""

    make: Callable[[np.ndarray, np.ndarray], Tensor]
    scale: np.ndarray
    shift: np.ndarray
    shape: tuple


Value = np.ndarray | Tensor | LazyAffine


class Graph:
    """Nodes and constants of an ONNX graph, and the values of the trace's variables."""

    def __init__(self):
        self.nodes: list[Node] = []
        self.constants: dict[str, np.ndarray] = {}
        self._names: dict[tuple, str] = {}

    def add(self, kind: str, inputs: Sequence, shape, is_first=False, **settings):
        """Add a node; inputs are tensors, or arrays as constants."""
        names = tuple(
            x.name if isinstance(x, Tensor) else self.constant(x) for x in inputs
        )
        output = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(Node(kind, names, output, settings))
        return Tensor(output, tuple(shape), is_first)

    def constant(self, array) -> str:
        """Name of a constant in the graph; equal arrays are stored once."""
        array = np.asarray(array)
        digest = hashlib.sha256(array.tobytes()).digest()
        key = array.dtype.str, array.shape, digest
        name = self._names.setdefault(key, f"constant_{len(self.constants)}")
        self.constants[name] = array
        return name

    def first(self, x: Tensor) -> Tensor:
        """Transpose a map [B, H, W, C] of the trace to channels first."""
        if x.is_first:
            return x
        return self.add("Transpose", [x], x.shape, True, perm=TO_FIRST)

    def last(self, x: Tensor) -> Tensor:
        """Transpose a tensor to its layout in the trace."""
        if not x.is_first:
            return x
        return self.add("Transpose", [x], x.shape, perm=TO_LAST)


def trace_graph(function: Callable, input_shape: Sequence[int]) -> tuple[Graph, Tensor]:
    """Graph of function(images [B, H, W, C]) -> [B, D], and its output.

    The input is called "images", [B, C, H, W].
    """
    images = jax.ShapeDtypeStruct((BATCH, *input_shape), np.float32)
    traced = jax.jit(function).trace(images).jaxpr
    graph = Graph()
    inputs = [Tensor("images", images.shape, len(input_shape) == 3)]
    (output,) = walk(graph, traced.jaxpr, list(map(np.asarray, traced.consts)), inputs)
    return graph, graph.last(materialize(graph, output))


def walk(graph: Graph, jaxpr, consts: Sequence, inputs: Sequence[Value]) -> list[Value]:
    """Translate a jaxpr; return the values of its outputs."""
    values = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True)
    )
    uses = _count_uses(jaxpr)
    read = lambda x: np.asarray(x.val) if isinstance(x, Literal) else values[x]
    for eqn in jaxpr.eqns:
        for x in eqn.invars:  # a value that is used twice is computed once
            if not isinstance(x, Literal) and uses[x] > 1:
                values[x] = materialize(graph, values[x])
        outputs = translate(graph, eqn, [read(x) for x in eqn.invars])
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _count_uses(jaxpr) -> dict:
    """Count how often each variable is read."""
    uses = {}
    for x in [x for eqn in jaxpr.eqns for x in eqn.invars] + list(jaxpr.outvars):
        if not isinstance(x, Literal):
            uses[x] = uses.get(x, 0) + 1
    return uses


def materialize(graph: Graph, value: Value) -> np.ndarray | Tensor:
    """Add a pending `LazyAffine` to the graph; return other values unchanged."""
    if isinstance(value, LazyAffine):
        return value.make(value.scale, value.shift)
    return value


def lazy_affine(make: Callable, shape: Sequence[int]) -> LazyAffine:
    """1 times a tensor that `make` adds plus 0, per channel."""
    ones = np.ones(shape[-1], np.float32)
    return LazyAffine(make, ones, 0 * ones, tuple(shape))


def affine(graph: Graph, x: Tensor) -> LazyAffine:
    """Start an affine map of x, per channel."""

    def make(scale, shift):
        wide = (-1, 1, 1) if x.is_first else (-1,)
        y = x
        if np.any(scale != 1):
            y = graph.add("Mul", [y, scale.reshape(wide)], x.shape, x.is_first)
        if np.any(shift != 0):
            y = graph.add("Add", [y, shift.reshape(wide)], x.shape, x.is_first)
        return y

    return lazy_affine(make, x.shape)


def per_channel(x: np.ndarray, shape: Sequence) -> np.ndarray | None:
    """Values [C] if x, broadcast to `shape` [..., C], depends on the last axis only."""
    channels = shape[-1]
    if channels == BATCH or x.ndim > len(shape):
        return None
    if x.size == 1:
        return np.full(channels, x.reshape(()), x.dtype)
    if x.shape[-1] != channels:
        return None
    rows = x.reshape(-1, channels)
    return rows[0] if np.all(rows == rows[:1]) else None


# Translations: (graph, name in JAX, its parameters, inputs, shape in the trace).

REDUCE = {
    "reduce_sum": "ReduceSum",
    "reduce_max": "ReduceMax",
    "reduce_min": "ReduceMin",
}


def _convolution(graph, name, params, inputs, shape):
    """Translate a convolution, lazily: a following bias or scale is absorbed."""
    x, kernel = inputs
    numbers = params["dimension_numbers"]
    specs = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    is_usual = specs == (TO_FIRST, (3, 2, 0, 1), TO_FIRST)
    if not is_usual or not isinstance(kernel, np.ndarray) or len(kernel.shape) != 4:
        raise ValueError(f"convolutions must be NHWC by HWIO constants, got {specs}.")
    if params["lhs_dilation"] != (1, 1) or params["batch_group_count"] != 1:
        raise ValueError("transposed convolutions cannot be exported to ONNX.")
    x, lows_and_highs = graph.first(x), np.transpose(params["padding"])
    settings = {
        "strides": params["window_strides"],
        "pads": tuple(int(n) for n in lows_and_highs.reshape(-1)),
        "dilations": params["rhs_dilation"],
        "group": params["feature_group_count"],
    }

    def make(scale, shift):
        weights = (kernel * scale).transpose(3, 2, 0, 1)
        operands = [x, weights, shift] if np.any(shift != 0) else [x, weights]
        return graph.add("Conv", operands, shape, True, **settings)

    return lazy_affine(make, shape)


def _product(graph, name, params, inputs, shape):
    """Translate a matrix product; lazily for a linear layer with constant weights."""
    (left, right), _ = params["dimension_numbers"]
    x, weights = inputs
    is_linear = isinstance(x, Tensor) and isinstance(weights, np.ndarray)
    if is_linear and len(x.shape) == weights.ndim == 2 and tuple(left) == (1,):
        weights = weights if tuple(right) == (0,) else weights.T

        def make(scale, shift):
            return graph.add("Gemm", [x, weights * scale, shift], shape)

        return lazy_affine(make, shape)
    operands = [graph.last(x) if isinstance(x, Tensor) else x for x in inputs]
    ranks = [len(x.shape) for x in operands]
    equation = _equation(params["dimension_numbers"], *ranks)
    return graph.add("Einsum", operands, shape, equation=equation)


def _equation(numbers, rank, other_rank) -> str:
    """Einsum equation of a `dot_general`."""
    (left, right), (left_batch, right_batch) = numbers
    letters = string.ascii_lowercase
    mine, other = list(letters[:rank]), list(letters[rank : rank + other_rank])
    left, right = (*left, *left_batch), (*right, *right_batch)
    for i, j in zip(left, right, strict=True):
        other[j] = mine[i]
    output = [mine[i] for i in left_batch]
    output += [mine[i] for i in range(rank) if i not in left]
    output += [other[j] for j in range(other_rank) if j not in right]
    return f"{''.join(mine)},{''.join(other)}->{''.join(output)}"


def _open(shape) -> np.ndarray:
    """Shape for Reshape, with -1 for the batch."""
    if any(n > BATCH and n % BATCH == 0 for n in shape):
        raise ValueError("the model must keep the batch axis, got it reshaped.")
    return np.array([-1 if n == BATCH else n for n in shape], np.int64)


def _reshape(graph, name, params, inputs, shape):
    x = graph.last(inputs[0])
    return graph.add("Reshape", [x, _open(shape)], shape)


def broadcast(graph, x, shape, dimensions):
    """Broadcast a constant in all axes but the batch, a tensor by axes of 1."""
    axis_of = {axis: i for i, axis in enumerate(dimensions)}
    x = x if isinstance(x, np.ndarray) else graph.last(materialize(graph, x))
    axes = range(len(shape))
    aligned = tuple(x.shape[axis_of[i]] if i in axis_of else 1 for i in axes)
    if isinstance(x, np.ndarray):
        constant_shape = tuple(1 if n == BATCH else n for n in shape)
        return np.broadcast_to(x.reshape(aligned), constant_shape)
    if aligned == x.shape:
        return x
    return graph.add("Reshape", [x, _open(aligned)], aligned)


def _transpose(graph, name, params, inputs, shape):
    (x,), order = inputs, tuple(params["permutation"])
    if x.is_first and order == TO_FIRST:
        return Tensor(x.name, shape)
    if not x.is_first and order == TO_LAST:
        return Tensor(x.name, shape, True)
    return graph.add("Transpose", [graph.last(x)], shape, perm=order)


def _reduce(graph, name, params, inputs, shape):
    (x,), axes = inputs, tuple(params["axes"])
    if 0 in axes:
        raise ValueError(
            "the model must treat every image separately, got a sum over the batch. "
            "Export it in evaluation mode, with batch normalization folded."
        )
    if x.is_first and len(shape) > 2:
        x = graph.last(x)
    axes = [TO_FIRST.index(axis) for axis in axes] if x.is_first else axes
    kind, numbers = REDUCE[name], np.array(axes, np.int64)
    if kind == "ReduceSum":  # the others take axes as an attribute until opset 18
        return graph.add(kind, [x, numbers], shape, keepdims=0)
    return graph.add(kind, [x], shape, keepdims=0, axes=tuple(numbers.tolist()))


def _axes(x: Tensor) -> list[int]:
    """Axes in the graph of a tensor's axes in the trace."""
    return [TO_FIRST.index(i) if x.is_first else i for i in range(len(x.shape))]


def _slice(graph, name, params, inputs, shape):
    (x,), steps = inputs, params["strides"] or [1] * len(shape)
    bounds = params["start_indices"], params["limit_indices"]
    parts = zip(*bounds, steps, _axes(x), strict=True)
    changed = [p for p, n in zip(parts, x.shape, strict=True) if p[:3] != (0, n, 1)]
    if not changed:
        return x
    columns = [np.array(column, np.int64) for column in zip(*changed, strict=True)]
    starts, stops, steps, axes = columns
    return graph.add("Slice", [x, starts, stops, axes, steps], shape, x.is_first)


def _reverse(graph, name, params, inputs, shape):
    (x,), order = inputs, params["dimensions"]
    axes = np.array([_axes(x)[i] for i in order], np.int64)
    backwards = np.full(len(axes), -1, np.int64)
    ends = np.full(len(axes), np.iinfo(np.int64).min)
    return graph.add("Slice", [x, backwards, ends, axes, backwards], shape, x.is_first)


def _pad(graph, name, params, inputs, shape):
    x, value = inputs
    config = params["padding_config"]
    if any(inner or min(low, high) < 0 for low, high, inner in config):
        raise ValueError(
            f"padding must be non-negative and not between elements, got {config}."
        )
    pads, axes = np.zeros((2, len(config)), np.int64), _axes(x)
    for axis, (low, high, _) in zip(axes, config, strict=True):
        pads[:, axis] = low, high
    return graph.add("Pad", [x, pads.reshape(-1), value], shape, x.is_first)


def _concatenate(graph, name, params, inputs, shape):
    operands = [graph.last(x) if isinstance(x, Tensor) else x for x in inputs]
    return graph.add("Concat", operands, shape, axis=params["dimension"])


STRUCTURAL = {
    **dict.fromkeys(REDUCE, _reduce),
    "conv_general_dilated": _convolution,
    "dot_general": _product,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "rev": _reverse,
    "slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
}


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
SAME = ("stop_gradient", "copy", "copy_p", "name", "optimization_barrier")
SAME += ("sharding_constraint",)
CALLS = ("pjit", "jit", "closed_call", "core_call", "remat", "remat2", "checkpoint")
CALLS += ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def translate(graph: Graph, eqn, inputs: list[Value]) -> list[Value]:
    """Translate an equation; return constants if all its inputs are constants."""
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
        results = eqn.primitive.bind(*inputs, **params)
        outputs = results if eqn.primitive.multiple_results else [results]
        return [np.asarray(x) for x in outputs]
    if name in SAME:
        return inputs
    if name in ("add", "sub", "mul", "div"):
        absorbed = _absorb_affine(graph, name, *inputs)
        if absorbed is not None:
            return [absorbed]
    inputs = [materialize(graph, x) for x in inputs]
    if name in PLAIN or name in COMPOSED:
        return [_elementwise(graph, name, params, inputs, shape)]
    if name not in STRUCTURAL:
        raise ValueError(
            f"the model must use operations that can be exported, got {name}."
        )
    return [STRUCTURAL[name](graph, name, params, inputs, shape)]


def _call(graph, params, inputs):
    inner = params.get("call_jaxpr", params.get("jaxpr"))
    is_closed = hasattr(inner, "consts")
    jaxpr, consts = (inner.jaxpr, inner.consts) if is_closed else (inner, [])
    name = jaxpr.debug_info.func_name.partition(" ")[0]
    if name == "prelu" and isinstance(inputs[1], np.ndarray):
        x = materialize(graph, inputs[0])
        slope = inputs[1].reshape((-1, 1, 1) if x.is_first else (-1,))
        return [graph.add("PRelu", [x, slope], x.shape, x.is_first)]
    return walk(graph, jaxpr, list(map(np.asarray, consts)), inputs)


def _scan(graph, params, inputs):
    """Unroll a scan."""
    closed, length = params["jaxpr"], params["length"]
    num_consts, num_carry = scan_sizes(params)
    consts, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
    rows = inputs[num_consts + num_carry :]
    if params["reverse"] or len(closed.jaxpr.outvars) > num_carry:
        raise ValueError(
            "a scan with outputs per step, or a reverse one, cannot be exported."
        )
    for i in range(length):
        slices = [x[i] for x in rows]
        step_inputs = [*consts, *carry, *slices]
        carry = walk(
            graph, closed.jaxpr, list(map(np.asarray, closed.consts)), step_inputs
        )
        carry = [materialize(graph, x) for x in carry]
    return carry


def _absorb_affine(graph: Graph, name: str, x: Value, y: Value) -> LazyAffine | None:
    """Absorb a per-channel constant x or y into a `LazyAffine` of the other."""
    if isinstance(x, np.ndarray) and name in ("add", "mul"):
        x, y = y, x
    if isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
        return None
    vector = per_channel(y, x.shape)
    is_number = y.dtype == np.float32 and len(x.shape) in (2, 4)
    if vector is None or not is_number or x.shape[0] == 1:
        return None
    base = x if isinstance(x, LazyAffine) else affine(graph, x)
    if name in ("mul", "div"):
        by = vector if name == "mul" else 1 / vector
        return base._replace(scale=base.scale * by, shift=base.shift * by)
    by = vector if name == "add" else -vector
    return base._replace(shift=base.shift + by)


def _elementwise(graph, name, params, inputs, shape) -> Tensor:
    is_first = len(shape) == 4 and any(
        isinstance(x, Tensor) and x.is_first for x in inputs
    )
    operands = [_as_first(graph, x) if is_first else x for x in inputs]
    if name in COMPOSED:
        return COMPOSED[name](graph, params, operands, shape, is_first)
    return graph.add(PLAIN[name], operands, shape, is_first)


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
    exponent = np.asarray(params.get("y", 2), np.float32)
    return graph.add("Pow", [*inputs, exponent], shape, is_first)


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


OPSET = 17  # of 2022, which all current runtimes support
FORMAT = 8  # version of the file format, of the same year
MAX_BYTES = 2**31 - 2**24  # bytes of a file; above, constants are in a second file


def write_onnx(
    graph: Graph,
    output: Tensor,
    input_shape: Sequence[int],
    about: Mapping[str, str],
    path: pathlib.Path,
) -> None:
    """Write an ONNX file from images [N, C, H, W] to embeddings [N, D] for any N.

    Raises:
      ImportError: without the package onnx.
    """
    import onnx
    from onnx import helper, numpy_helper

    height, width, channels = input_shape
    number = onnx.TensorProto.FLOAT
    value = lambda name, shape: helper.make_tensor_value_info(name, number, shape)
    last = helper.make_node("Identity", [output.name], ["embedding"])
    model = helper.make_model(
        helper.make_graph(
            [*(_node(helper, node) for node in graph.nodes), last],
            "fedfr_jax",
            [value("images", ["N", channels, height, width])],
            [value("embedding", ["N", output.shape[-1]])],
            [
                numpy_helper.from_array(np.ascontiguousarray(array), name)
                for name, array in graph.constants.items()
            ],
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=FORMAT,
        producer_name="fedfr_jax",
    )
    helper.set_model_props(model, dict(about))
    size = sum(array.nbytes for array in graph.constants.values())
    external = {"location": f"{path.name}.data"} if size > MAX_BYTES else {}
    onnx.save_model(model, path, save_as_external_data=bool(external), **external)
    onnx.checker.check_model(path)


def _node(helper, node):
    settings = node.settings
    if node.kind == "Cast":
        settings = {"to": helper.np_dtype_to_tensor_dtype(settings["to"])}
    return helper.make_node(node.kind, node.inputs, [node.output], **settings)
