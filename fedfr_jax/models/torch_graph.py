"""Networks as graphs of PyTorch's operators: data, evaluated without PyTorch.

`torch_module` makes a graph of a module; a trained model keeps it among its settings as
values of JSON, so that whoever loads the model needs neither PyTorch nor the module's
code. Parameters keep PyTorch's dotted names as paths, "layer1.0.conv1.weight" is
params/layer1/0/conv1/weight; buffers of floats, such as running statistics, and
parameters that do not require a gradient are batch_stats. An array with four axes lies
as [H, W, I, O].
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.models.aten import NUMBERS, OPERATORS, RANDOM
from fedfr_jax.models.aten.tensors import (
    KERNEL,
    Ordered,
    Tensor,
    channels_last,
    from_channels_last,
    plain,
)
from fedfr_jax.trees import by_name
from fedfr_jax.types import InputShape, Model, PyTree, input_structs

FUNCTIONS = {
    **OPERATORS,
    **RANDOM,
    **{f"number.{name}": function for name, function in NUMBERS.items()},
}
LONGEST = 100  # characters of a stranger's text in an error


class Ref(NamedTuple):
    """What a node has computed, as another's argument."""

    name: str


class Node(NamedTuple):
    """One call of an operator."""

    name: str
    operator: str  # of aten, "relu" or "max.dim"; "number.add" of numbers
    args: Any  # tuples, dicts, numbers, texts, `Ref`
    kwargs: Any


class Graph(NamedTuple):
    """A network in one mode, training or evaluation."""

    leaves: Mapping[str, str]  # names of nodes -> leaves or constants that they are
    inputs: tuple[str, ...]  # nodes that are the inputs, in their order
    nodes: tuple[Node, ...]
    output: str
    updates: Mapping[str, str]  # leaf of batch_stats -> node of its new value


class Network(NamedTuple):
    """A network from a PyTorch module, without its numbers."""

    train: Graph
    evaluate: Graph
    shapes: Mapping[str, tuple[int, ...]]  # of leaves by path, in our layouts
    constants: Mapping[str, np.ndarray]  # buffers of whole numbers, and literals
    # Names of the state dict -> paths of leaves or constants
    state_dict: Mapping[str, str]


def run(
    graph: Graph,
    leaves: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    key: jax.Array | None,
) -> dict[str, Any]:
    """Values of all nodes of a graph, and of its inputs.

    Args:
      leaves: parameters, statistics and constants by path.
      key: of random operators, which need one.
    """
    values = {node: leaves[path] for node, path in graph.leaves.items()}
    values |= dict(zip(graph.inputs, inputs, strict=True))
    for number, node in enumerate(graph.nodes):
        args, kwargs = (_filled(x, values) for x in (node.args, node.kwargs))
        if _family(node.operator) in RANDOM:
            kwargs["draw"] = _drawing(key, number, node)
        try:
            values[node.name] = find_operator(node.operator)(*args, **kwargs)
        except (TypeError, IndexError, AttributeError, NotImplementedError) as error:
            reason = next(iter(str(error).splitlines()), "")[: 2 * LONGEST]
            raise ValueError(
                f"module must call operators with arguments that are known here, got "
                f"aten.{node.operator}: {reason}"
            ) from error
    return values


def _drawing(key, number: int, node: Node) -> Callable[[], jax.Array]:
    def draw():
        if key is None:
            raise ValueError(
                f"key must be given to a network with random operators, got None for "
                f"{node.operator}."
            )
        return jax.random.fold_in(key, number)

    return draw


def _family(operator: str) -> str:
    return operator.partition(".")[0]


def is_known(operator: str) -> bool:
    """Whether there is a function for an operator."""
    return bool({operator, _family(operator)} & FUNCTIONS.keys())


def find_operator(operator: str) -> Callable:
    """The function of an operator, that of its overload first."""
    return FUNCTIONS.get(operator) or FUNCTIONS[_family(operator)]


def _filled(x: Any, values: Mapping[str, Any]) -> Any:
    """Arguments with values for references."""
    if isinstance(x, Ref):
        return values[x.name]
    if isinstance(x, Mapping):
        return {key: _filled(one, values) for key, one in x.items()}
    return [_filled(one, values) for one in x] if isinstance(x, list | tuple) else x


def references(x: Any) -> Iterator[str]:
    """Names of the nodes in arguments."""
    if isinstance(x, Ref):
        yield x.name
    elif isinstance(x, Mapping):
        yield from references([*x.values()])
    elif isinstance(x, list | tuple):
        yield from itertools.chain.from_iterable(map(references, x))


def without_unused(graph: Graph) -> Graph:
    """The graph without nodes that neither output nor statistics need."""
    needed, nodes = {graph.output, *graph.updates.values()}, []
    for node in reversed(graph.nodes):
        if node.name in needed:
            nodes.append(node)
            needed |= {*references(node.args), *references(node.kwargs)}
    leaves = {name: path for name, path in graph.leaves.items() if name in needed}
    return graph._replace(nodes=tuple(nodes[::-1]), leaves=leaves)


# The model


def build_torch_model(
    network: Network, input_shape: InputShape, init: Callable[[jax.Array], PyTree]
) -> Model:
    """Build the model of a network.

    Its features are what its last layer takes, if that is linear, else its output.

    Args:
      init: key -> variables.
    """
    count = len(jax.tree.leaves(input_structs(input_shape)))
    if {len(network.train.inputs), len(network.evaluate.inputs)} != {count}:
        raise ValueError(
            f"input_shape must have {len(network.train.inputs)} inputs, as the graph, "
            f"got {input_shape}."
        )

    def features(variables, x, train=False, key=None):
        graph = network.train if train else network.evaluate
        leaves = {path: jnp.asarray(x) for path, x in network.constants.items()}
        leaves |= {path: _as_tensor(x) for path, x in by_name(variables).items()}
        dtype = jax.tree.leaves(variables["params"])[0].dtype
        inputs = [_as_input(leaf.astype(dtype)) for leaf in jax.tree.leaves(x)]
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            values = run(graph, leaves, inputs, key)
        new = {path: plain(values[node]) for path, node in graph.updates.items()}
        old = by_name({"batch_stats": variables["batch_stats"]})
        stats = {p: stored(new[p]) if p in new else x for p, x in old.items()}
        output = _as_output(values[graph.output])
        return output, _features(graph, values, output), tree_of(stats)["batch_stats"]

    def apply(variables, x, train=False, key=None):
        output, _, stats = features(variables, x, train, key)
        return output, stats

    def check(key):  # raises what a network cannot do before anything is compiled
        variables = init(key)
        x = jax.tree.map(lambda s: jnp.zeros(s.shape), input_structs(input_shape, 2))
        return [apply(variables, x, train, key)[0] for train in (True, False)]

    _, output = jax.eval_shape(check, jax.random.key(0))
    return Model(
        init=init,
        apply=apply,
        input_shape=input_shape,
        embedding_dim=output.shape[-1],
        blocks=layers(network),
        apply_with_features=features,
        config={"name": "torch", "graph": to_json(network)},
    )


def _as_tensor(leaf) -> Tensor:
    return Ordered(leaf, KERNEL) if leaf.ndim == 4 else leaf


def stored(leaf):
    """A leaf as variables have it."""
    return leaf.transpose(KERNEL) if leaf.ndim == 4 else leaf


def _as_input(x) -> Tensor:
    """[B, H, W, C] as a tensor [B, C, H, W]."""
    return from_channels_last(x) if x.ndim == 4 else x


def _as_output(y: Tensor) -> jax.Array:
    """[B, D], or [B, H, W, D] of a tensor [B, D, H, W]."""
    return channels_last(y) if y.ndim == 4 else plain(y)


def _features(graph: Graph, values: Mapping[str, Any], output: jax.Array) -> jax.Array:
    last = [node for node in graph.nodes if node.name == graph.output]
    if not last or _family(last[0].operator) != "linear":
        return output
    return plain(values[last[0].args[0].name])


def layers(network: Network) -> tuple[str, ...]:
    """Modules with parameters, in the order in which the data meet them."""
    leaves = {name: path for name, path in network.evaluate.leaves.items()}
    met = {}
    for node in network.evaluate.nodes:
        for name in references([node.args, node.kwargs]):
            path = leaves.get(name, "")
            if path.startswith("params/"):
                met[path.removeprefix("params/").rpartition("/")[0]] = None
    return tuple(filter(None, met))


def tree_of(leaves: Mapping[str, Any]) -> dict:
    """Variables, a tree of dicts, of leaves by path."""
    tree: dict = {"params": {}, "batch_stats": {}}
    for path, leaf in leaves.items():
        *folders, last = path.split("/")
        branch = tree
        for folder in folders:
            branch = branch.setdefault(folder, {})
        branch[last] = leaf
    return tree


# As values of JSON


def to_json(network: Network) -> dict[str, Any]:
    """A network as values of JSON."""
    return {
        "train": _graph_json(network.train),
        "evaluate": _graph_json(network.evaluate),
        "shapes": {path: [*shape] for path, shape in network.shapes.items()},
        "constants": {
            path: {
                "dtype": x.dtype.name,
                "shape": [*x.shape],
                "values": x.ravel().tolist(),
            }
            for path, x in network.constants.items()
        },
        "state_dict": dict(network.state_dict),
    }


def _graph_json(graph: Graph) -> dict[str, Any]:
    nodes = [
        [x.name, x.operator, _to_value(x.args), _to_value(x.kwargs)]
        for x in graph.nodes
    ]
    fields = graph._asdict() | {"nodes": nodes, "inputs": [*graph.inputs]}
    return fields | {k: dict(fields[k]) for k in ("leaves", "updates")}


def from_json(value: Mapping[str, Any]) -> Network:
    """The network of `to_json`.

    Raises:
      ValueError: for anything else, or an operator or a value that is unknown here.
    """
    try:
        network = Network(
            train=_read_graph(value["train"]),
            evaluate=_read_graph(value["evaluate"]),
            shapes={k: tuple(map(int, x)) for k, x in value["shapes"].items()},
            constants={
                k: np.array(x["values"], x["dtype"]).reshape(x["shape"])
                for k, x in value["constants"].items()
            },
            state_dict=_texts(value["state_dict"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__} {error}"[:LONGEST].split())
        raise ValueError(
            f"graph must be that of a PyTorch module, got another: {reason}."
        ) from error
    check_operators(network)
    for graph in (network.train, network.evaluate):
        _check_names(graph, network)
    return network


def _read_graph(value: Mapping[str, Any]) -> Graph:
    nodes = [
        Node(str(name), str(operator), _from_value(args), _from_value(kwargs))
        for name, operator, args, kwargs in value["nodes"]
    ]
    return Graph(
        leaves=_texts(value["leaves"]),
        inputs=tuple(map(str, value["inputs"])),
        nodes=tuple(nodes),
        output=str(value["output"]),
        updates=_texts(value["updates"]),
    )


def _texts(value: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(text) for key, text in value.items()}


def _check_names(graph: Graph, network: Network) -> None:
    """Raise ValueError for the first name that stands for nothing."""
    leaves = network.shapes.keys() | network.constants.keys()

    def check(names, known):
        for name in names:
            if name not in known:
                raise ValueError(
                    "graph must have a value for each name, got none for "
                    f"{name[:LONGEST]!r}. The file is damaged or not of this library."
                )

    check(graph.leaves.values(), leaves)
    known = {*graph.leaves, *graph.inputs}
    for node in graph.nodes:
        check(references([node.args, node.kwargs]), known)
        known.add(node.name)
    check([graph.output, *graph.updates.values()], known)
    check(graph.updates, network.shapes)
    check(network.state_dict.values(), leaves)


def check_operators(network: Network) -> None:
    """Raise ValueError for the first operator that is unknown here."""
    for node in (*network.train.nodes, *network.evaluate.nodes):
        if not is_known(node.operator):
            operator = node.operator[:LONGEST]
            raise ValueError(f"graph must have known operators, got {operator}.")


def _to_value(x: Any) -> Any:
    if isinstance(x, Ref):
        return {"ref": x.name}
    if isinstance(x, Mapping):
        return {"dict": {key: _to_value(one) for key, one in x.items()}}
    if isinstance(x, list | tuple):
        return [_to_value(one) for one in x]
    return str(x) if isinstance(x, float) and not np.isfinite(x) else x


def _from_value(x: Any) -> Any:
    if isinstance(x, Mapping):
        if "ref" in x:
            return Ref(str(x["ref"]))
        return {key: _from_value(one) for key, one in x["dict"].items()}
    if isinstance(x, list | tuple):
        return [_from_value(one) for one in x]
    return float(x) if x in ("inf", "-inf", "nan") else x


# To PyTorch


def state_arrays(network: Network, variables: PyTree) -> dict[str, np.ndarray]:
    """The module's state dict as arrays in PyTorch's layouts."""
    arrays = by_name(variables)
    state = {}
    for name, path in network.state_dict.items():
        if path in network.constants:
            state[name] = network.constants[path]
            continue
        array = np.asarray(arrays[path])
        state[name] = array.transpose(3, 2, 0, 1) if array.ndim == 4 else array
    return state
