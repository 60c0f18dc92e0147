"""PyTorch modules as models: traced once by `torch.export`, trained in JAX.

`from_torch` traces the module in training and in evaluation for any batch size. What
comes out is a graph of operators, `torch_graph`, which JAX differentiates, maps over
clients and compiles for any platform; PyTorch computes nothing any more.
"""

import contextlib
import copy
import inspect
import io
import logging
import pathlib
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.models.torch_graph import (
    Graph,
    Network,
    Node,
    Ref,
    build_torch_model,
    from_json,
    is_known,
    state_arrays,
    stored,
    tree_of,
    without_unused,
)
from fedfr_jax.types import InputShape, Model, PyTree, input_structs

EXAMPLES = 8  # of the batch with which a module is traced
WIDE = {"int64": "int32", "float64": "float32"}  # dtypes as JAX has them by default
# Arguments of operators that say where and how a tensor lies
PLACES = ("device", "layout", "memory_format", "pin_memory", "generator")
Variables = dict[str, np.ndarray]  # by path, in our layouts


def from_torch(module: Any, input_shape: InputShape) -> Model:
    """Convert a PyTorch module to a model.

    Args:
      module: a `torch.nn.Module` whose forward takes [B, C, H, W], the pixels of
        `Model.apply` with channels first; [B, D] where the input is (D,), or arguments
        by name. It stays as it is.
      input_shape: (H, W, C), (D,) or {name: shape}.

    Returns:
      A model whose `init` gives the module's numbers, whatever the key. Parameters
      that do not require a gradient are not trained.

    Raises:
      ValueError: for anything but a module, one whose control flow depends on the
        values of tensors, or an operator that is unknown here: names it and its module.
      ImportError: without PyTorch.
    """
    network, arrays = trace(module, input_shape)
    tree = tree_of(arrays)

    def init(key):
        del key
        return jax.tree.map(jnp.asarray, tree)

    return build_torch_model(network, input_shape, init)


def to_torch(model: Model, variables: PyTree) -> dict[str, Any]:
    """State dict of a model that `from_torch` made: tensors, for `load_state_dict`."""
    config = model.config or {}
    if "graph" not in config:
        raise ValueError(
            f"model must be one of ff.from_torch, got {config.get('name', 'another')}."
        )
    torch = import_torch()
    arrays = state_arrays(from_json(config["graph"]), variables)
    return {name: torch.from_numpy(np.array(x)) for name, x in arrays.items()}


def import_torch() -> Any:
    """The package torch.

    Raises:
      ImportError: without it, naming how to install it.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "PyTorch modules need PyTorch: pip install 'fedfr_jax[torch]'."
        ) from error
    return torch


# Tracing


def trace(module: Any, input_shape: InputShape) -> tuple[Network, Variables]:
    """Trace a module: its network, and its numbers by path."""
    torch = import_torch()
    if not isinstance(module, torch.nn.Module):
        raise ValueError(f"module must be a torch.nn.Module, got {module!r}.")
    module = copy.deepcopy(module).cpu()
    tensors = _tensors(module)
    paths, arrays = _paths(tensors), numbers(module)
    if not any(path.startswith("params/") for path in arrays):
        raise ValueError(
            "module must have parameters that require a gradient, got none."
        )
    constants = {
        path: _array(tensors[name])
        for name, path in paths.items()
        if path.startswith("constants/")
    }
    graphs = []
    for mode in ("train", "evaluate"):
        module.train(mode == "train")
        program = _export(torch, module, input_shape)
        literals = {k: x for k, x in program.constants.items() if k not in paths}
        places = {name: f"constants/{mode}/{name}" for name in literals}
        graphs.append(_graph(program, paths | places))
        constants |= {places[name]: _array(x) for name, x in literals.items()}
    used = {path for graph in graphs for path in graph.leaves.values()}
    state_dict = {name: paths[name] for name in module.state_dict() if name in paths}
    used |= {*state_dict.values()}
    network = Network(
        train=graphs[0],
        evaluate=graphs[1],
        shapes={path: array.shape for path, array in arrays.items()},
        constants={path: x for path, x in constants.items() if path in used},
        state_dict=state_dict,
    )
    return network, arrays


def numbers(module: Any) -> Variables:
    """Parameters and buffers of floats by path."""
    tensors = _tensors(module)
    paths = _paths(tensors).items()
    leaves = {path: name for name, path in paths if not path.startswith("constants/")}
    return {path: stored(_array(tensors[name])) for path, name in leaves.items()}


def _tensors(module: Any) -> dict[str, Any]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _paths(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Paths of parameters and buffers by name; those with two names have one."""
    known: dict[int, str] = {}
    paths = {}
    for name, tensor in tensors.items():
        collection = "params" if tensor.requires_grad else "batch_stats"
        if not tensor.is_floating_point():
            collection = "constants"
        path = f"{collection}/{name.replace('.', '/')}"
        paths[name] = known.setdefault(id(tensor), path)
    return paths


def _array(tensor: Any) -> np.ndarray:
    """A tensor as float32, int32 or bool."""
    tensor = tensor.detach()
    if tensor.is_floating_point():
        return tensor.float().numpy()
    array = tensor.numpy()
    return array.astype(np.int32) if array.dtype.kind == "i" else array


def _export(torch: Any, module: Any, input_shape: InputShape) -> Any:
    """Trace a module in its present mode, for any number of examples."""
    structs = input_structs(input_shape)
    example = lambda struct: torch.zeros(_torch_shape(struct.shape))
    batch = {0: torch.export.Dim.DYNAMIC}
    if isinstance(input_shape, Mapping):
        args, kwargs = (), {name: example(structs[name]) for name in sorted(structs)}
        dynamic = {name: batch for name in kwargs}
    else:
        args, kwargs, dynamic = (example(structs),), None, (batch,)
    try:
        with _quiet():
            program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic)
            regions = [x for x in map(_region, program.graph.nodes) if x]
            program = program.run_decompositions({})
    except Exception as error:  # PyTorch's are of many kinds
        raise ValueError(
            f"module must be one that torch.export can trace on inputs of shape "
            f"{input_shape}, got {_reason(error)}"
        ) from error
    if regions:
        raise ValueError(
            f"module must have no region of {regions[0]}, got one. Use tensor.detach()."
        )
    return program


def _region(node: Any) -> str:
    """What a region of a graph is called in which PyTorch acts otherwise, or ""."""
    name = str(node.target)
    return name if node.op == "call_function" and name.startswith("wrap_with") else ""


def _torch_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    _, *inner = shape
    if len(inner) == 3:
        inner = [inner[2], *inner[:2]]
    return (EXAMPLES, *inner)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what PyTorch prints and logs: an error says what matters."""
    before, unread = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(unread),
            contextlib.redirect_stderr(unread),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


REASONS = {  # of what PyTorch's errors say in more words
    "data-dependent": "control flow that depends on the values of tensors",
    "Constraints violated": "code for one size of the batch alone",
}


def _reason(error: Exception) -> str:
    """An error of PyTorch's in one line, with the line of the module's code."""
    text = next(filter(None, str(error).splitlines()), type(error).__name__)
    text = next((x for known, x in REASONS.items() if known in text), text.strip())
    own = [x for x in traceback.extract_tb(error.__traceback__) if _is_own(x.filename)]
    return f"{text} ({own[-1].filename}, line {own[-1].lineno})." if own else f"{text}."


def _is_own(file: str) -> bool:
    """Whether a file is neither a library's nor Python's."""
    return not {"site-packages", "dist-packages"} & {*pathlib.Path(file).parts} and (
        file not in (__file__, contextlib.__file__)
    )


def _graph(program: Any, paths: Mapping[str, str]) -> Graph:
    """The graph of an exported program."""
    kinds = {"leaves": {}, "inputs": []}
    signature = program.graph_signature
    for spec in signature.input_specs:
        if spec.kind.name == "USER_INPUT":
            kinds["inputs"].append(spec.arg.name)
        else:
            kinds["leaves"][spec.arg.name] = paths[spec.target]
    outputs, updates = [], {}
    for spec in signature.output_specs:
        if spec.kind.name == "USER_OUTPUT":
            outputs.append(spec.arg.name)
        elif spec.kind.name == "USER_INPUT_MUTATION":
            raise ValueError(
                f"module must leave its input {spec.target} as it is, got one that "
                "changes it in place. Write x = x * 2 in place of x.mul_(2)."
            )
        elif paths[spec.target].startswith("batch_stats/"):
            updates[paths[spec.target]] = spec.arg.name
    if len(outputs) != 1:
        raise ValueError(f"module must return one tensor, got {len(outputs)} values.")
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    graph = without_unused(
        Graph(
            leaves=kinds["leaves"],
            inputs=tuple(kinds["inputs"]),
            nodes=tuple(map(_node, calls)),
            output=outputs[0],
            updates=updates,
        )
    )
    for node in graph.nodes:
        if not is_known(node.operator):
            (call,) = [call for call in calls if call.name == node.name]
            raise ValueError(
                f"module must have operators that are known here, got aten."
                f"{node.operator}{_place(call)}. Write it in other operators."
            )
    return graph


def _node(call: Any) -> Node:
    kwargs = {k: x for k, x in call.kwargs.items() if k not in PLACES}
    return Node(call.name, _operator(call.target), _value(call.args), _value(kwargs))


def _operator(target: Any) -> str:
    """An operator below aten, "number.add" of Python, or PyTorch's own name."""
    text = str(target)
    if text.startswith("aten."):
        return text.removeprefix("aten.")
    is_function = inspect.isbuiltin(target) or inspect.isfunction(target)
    return f"number.{target.__name__}" if is_function else text


def _value(x: Any) -> Any:
    """An argument of a call as plain values and references."""
    if isinstance(x, list | tuple):
        return tuple(map(_value, x))
    if isinstance(x, Mapping):
        return {key: _value(one) for key, one in x.items()}
    if x is None or isinstance(x, bool | int | float | str):
        return x
    if type(x).__name__ == "dtype":
        name = str(x).removeprefix("torch.")
        return WIDE.get(name, name)
    return Ref(x.name) if type(x).__name__ == "Node" else None


def _place(call: Any) -> str:
    """Where in the module a call is, as far as PyTorch says."""
    stack = [*call.meta.get("nn_module_stack", {}).values()]
    path = stack[-1][0] if stack else ""
    return f" in the module's {path}" if path else ""
