"""ONNX graphs from traced models, and their files.

Building a graph does not need the package onnx, writing it does.

The trace (a jaxpr) is walked once. Values that do not depend on the images are computed
and become constants. Batch normalization is a factor and a summand per channel, which
the runtimes of ONNX fold into the convolution before it. Maps are [B, C, H, W] in the
graph after a convolution, [B, H, W, C] in the trace.
"""

import functools
import hashlib
import pathlib
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, primitives

from fedfr_jax.convolutions.pooling import max_pooling
from fedfr_jax.convolutions.rewriting import rewritten
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


Value = np.ndarray | Tensor


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
    traced = jax.jit(rewritten(function, lambda: BY_SLICES)).trace(images).jaxpr
    graph = Graph()
    inputs = [Tensor("images", images.shape, len(input_shape) == 3)]
    (output,) = walk(graph, traced.jaxpr, list(map(np.asarray, traced.consts)), inputs)
    assert isinstance(output, Tensor), "it depends on the images"
    return graph, graph.last(output)


def walk(graph: Graph, jaxpr, consts: Sequence, inputs: Sequence[Value]) -> list[Value]:
    """Translate a jaxpr; return the values of its outputs."""
    values = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True)
    )
    read = lambda x: np.asarray(x.val) if isinstance(x, Literal) else values[x]
    for eqn in jaxpr.eqns:
        outputs = translate(graph, eqn, [read(x) for x in eqn.invars])
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(x) for x in jaxpr.outvars]


BY_SLICES = {  # there are operations for what slices are made of
    primitives.reduce_window_max_p: functools.partial(max_pooling, larger=jnp.maximum)
}

# Translations: (graph, name in JAX, its parameters, inputs, shape in the trace).

REDUCE = {
    "reduce_sum": "ReduceSum",
    "reduce_max": "ReduceMax",
    "reduce_min": "ReduceMin",
}


def _convolution(graph, name, params, inputs, shape):
    x, kernel = inputs
    numbers = params["dimension_numbers"]
    specs = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    is_usual = specs == (TO_FIRST, (3, 2, 0, 1), TO_FIRST)
    if not is_usual or not isinstance(kernel, np.ndarray):
        raise ValueError(f"convolutions must be NHWC by HWIO constants, got {specs}.")
    if params["lhs_dilation"] != (1, 1) or params["batch_group_count"] != 1:
        raise ValueError("transposed convolutions cannot be exported to ONNX.")
    settings = {
        "strides": params["window_strides"],
        "pads": np.transpose(params["padding"]).reshape(-1).tolist(),
        "dilations": params["rhs_dilation"],
        "group": params["feature_group_count"],
    }
    operands = [graph.first(x), kernel.transpose(3, 2, 0, 1)]
    return graph.add("Conv", operands, shape, True, **settings)


def _product(graph, name, params, inputs, shape):
    operands = [graph.last(x) if isinstance(x, Tensor) else x for x in inputs]
    ranks = [len(x.shape) for x in operands]
    numbers = params["dimension_numbers"]
    if ranks == [2, 2] and numbers == (((1,), (0,)), ((), ())):
        return graph.add("MatMul", operands, shape)
    return graph.add("Einsum", operands, shape, equation=_equation(numbers, *ranks))


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
    """Add axes of 1; a constant without a batch is broadcast here, others in ONNX."""
    axis_of = {axis: i for i, axis in enumerate(dimensions)}
    x = x if isinstance(x, np.ndarray) else graph.last(x)
    axes = range(len(shape))
    aligned = tuple(x.shape[axis_of[i]] if i in axis_of else 1 for i in axes)
    if isinstance(x, np.ndarray):
        x = x.reshape(aligned)
        return x if BATCH in shape else np.broadcast_to(x, shape)
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
SAME_NAME = "add sub mul div max min pow neg exp log tanh erf sqrt abs sign floor"
PLAIN = {
    **{name: name.capitalize() for name in f"{SAME_NAME} and or not".split()},
    "add_any": "Add",
    "logistic": "Sigmoid",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
    "lt": "Less",
    "le": "LessOrEqual",
    "eq": "Equal",
}
SAME = ("stop_gradient", "copy", "copy_p", "name", "optimization_barrier")
SAME += ("sharding_constraint",)
CALLS = ("pjit", "jit", "closed_call", "core_call", "remat", "remat2", "checkpoint")
CALLS += ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def translate(graph: Graph, eqn, inputs: Sequence[Value]) -> Sequence[Value]:
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
        x = inputs[0]
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
    constants = list(map(np.asarray, closed.consts))
    for i in range(length):
        slices = [x[i] for x in rows]
        carry = walk(graph, closed.jaxpr, constants, [*consts, *carry, *slices])
    return carry


def _elementwise(graph, name, params, inputs, shape) -> Tensor:
    is_first = len(shape) == 4 and any(
        isinstance(x, Tensor) and x.is_first for x in inputs
    )
    operands = [_as_first(graph, x) if is_first else x for x in inputs]
    if name == "sub" and isinstance(operands[1], np.ndarray):
        name, operands[1] = "add", -operands[1]  # which runtimes fold
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


def _erfc(graph, params, inputs, shape, is_first):
    erf = graph.add("Erf", inputs, shape, is_first)
    return graph.add("Sub", [np.asarray(1, np.float32), erf], shape, is_first)


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
    "erfc": _erfc,
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
    is_large = sum(x.nbytes for x in graph.constants.values()) > MAX_BYTES
    place = f"{path.name}.data"
    onnx.save_model(model, path, save_as_external_data=is_large, location=place)
    onnx.checker.check_model(path)


def _node(helper, node):
    settings = node.settings
    if node.kind == "Cast":
        settings = {"to": helper.np_dtype_to_tensor_dtype(settings["to"])}
    return helper.make_node(node.kind, node.inputs, [node.output], **settings)
