"""PyTorch modules that a config names: {"name": "torch", "file": "mine.py:Net"}.

The file is code, which runs with the user's rights. So it runs where the user names it,
in a config file or in Python, and never because the stored config of a run does. A
trained model keeps its network as a graph, which is data.
"""

import inspect
import pathlib
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.models.torch_graph import (
    Network,
    build_torch_model,
    from_json,
    tree_of,
)
from fedfr_jax.models.torch_module import import_torch, numbers, trace
from fedfr_jax.ranges import Count
from fedfr_jax.types import InputShape, Model, PyTree


def torch_file(
    input_shape: InputShape,
    *,
    file: str = "",
    graph: Mapping[str, Any] | None = None,
    num_classes: Count | None = None,
    **arguments,
) -> Model:
    """A PyTorch module, see `torch_module.from_torch`.

    Args:
      file: "mine.py:Net", a file and the class in it, or a function that returns a
        module.
      graph: instead, a network as a trained model keeps it.
      num_classes: M, an argument of the class if it has one of this name.
      arguments: all other keys, arguments of the class.
    """
    if graph is not None:
        network = from_json(graph)
        return build_torch_model(network, input_shape, lambda key: drawn(network, key))
    make = load(file)
    if num_classes is not None and "num_classes" in inspect.signature(make).parameters:
        arguments["num_classes"] = num_classes

    def module(seed):
        return made(make, file, arguments, seed)

    network, arrays = trace(module(0), input_shape)
    shapes = jax.eval_shape(lambda: arrays)

    def init(key):
        draw = lambda seed: numbers(module(int(seed)))
        seed = jax.random.bits(key)
        return tree_of(jax.pure_callback(draw, shapes, seed, vmap_method="sequential"))

    return build_torch_model(network, input_shape, init)


def load(file: str) -> Callable:
    """What makes the module, of "PATH.py:NAME".

    Raises:
      ValueError: for another text, a file with an error, or without the name.
    """
    text, _, name = file.rpartition(":")
    path = pathlib.Path(text).expanduser().resolve()
    if not text or not path.is_file():
        raise ValueError(
            f'config.model.file must be "FILE.py:CLASS" of a file, got {file!r}.'
        )
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # for what the file imports
    try:
        make = runpy.run_path(str(path)).get(name)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"config.model.file must run without errors, got {_line(error, path)}."
        ) from error
    if not callable(make):
        raise ValueError(
            f"config.model.file must define {name}, a module or a function that "
            f"returns one, got {path} without it."
        )
    return make


def made(make: Callable, file: str, arguments: Mapping[str, Any], seed: int) -> Any:
    """Make the module, with PyTorch's random numbers from a seed."""
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"config.model must have the arguments of {file}"
            f"{inspect.signature(make)}, got {arguments}: {error}."
        ) from error
    torch = import_torch()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(**arguments)


def _line(error: BaseException, path: pathlib.Path) -> str:
    """An error in one line, with the file's line."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text} ({path}, line {lines[-1]})" if lines else text


def drawn(network: Network, key: jax.Array) -> PyTree:
    """Variables of a network whose module is not there, drawn anew.

    Weights are normal with variance 1 / fan_in, those of normalization 1, others 0.
    """

    def draw(path, shape, key):
        if len(shape) > 1:
            fan_in = np.prod(shape[:-1]) if len(shape) == 4 else np.prod(shape[1:])
            return jax.random.normal(key, shape) / np.sqrt(fan_in)
        return jnp.full(shape, float(path.endswith(("/weight", "_var"))))

    keys = jax.random.split(key, len(network.shapes))
    leaves = zip(network.shapes.items(), keys, strict=True)
    return tree_of({path: draw(path, shape, k) for (path, shape), k in leaves})
