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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

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
    from fedfr_jax.deploy.onnx_ops import translate  # which walks inner jaxprs

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


def affine(graph: Graph, x: Tensor) -> LazyAffine:
    """Start an affine map of x: 1 times x plus 0, per channel."""
    channels = x.shape[-1]

    def make(scale, shift):
        wide = (-1, 1, 1) if x.is_first else (-1,)
        y = x
        if np.any(scale != 1):
            y = graph.add("Mul", [y, scale.reshape(wide)], x.shape, x.is_first)
        if np.any(shift != 0):
            y = graph.add("Add", [y, shift.reshape(wide)], x.shape, x.is_first)
        return y

    return LazyAffine(
        make, np.ones(channels, np.float32), np.zeros(channels, np.float32), x.shape
    )


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
