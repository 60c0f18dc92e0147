"""The config's model, traced on an input's shape, and its initial weights.

config.pretrain.init of classification, re-identification and segmentation names a file
or another run. Modules with the same names ("stem", "stage1", ...) are initialized with
its weights; modules that it lacks, or whose last layer is for other classes, are
initialized randomly, and its other modules are ignored.
"""

import contextlib
import math
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.federated.model_parallel import gather
from fedfr_jax.models import MODELS
from fedfr_jax.models.bases import resized
from fedfr_jax.models.external_checkpoints import convert_variables, detect_model
from fedfr_jax.models.heads import with_projection
from fedfr_jax.models.saved_model import load_weights, named_arrays
from fedfr_jax.models.weights import Weights
from fedfr_jax.parts import INLINE, Member, Part, section
from fedfr_jax.ranges import MAX, Width
from fedfr_jax.scanned_blocks import by_block_name, unstack_like
from fedfr_jax.schema import naming
from fedfr_jax.tasks.trainers import Facts
from fedfr_jax.types import InputShape, Model, PyTree, input_structs

NAMES = {"reid": "reid", "segmentation": "segmenter"}  # of tasks with a usual network


def with_name(task: str, settings: Mapping) -> Mapping:
    """config.model with the task's default name, if it has none."""
    return {"name": NAMES[task], **settings} if task in NAMES else settings


class NetworkReader(NamedTuple):
    """Reader of a network: a member of MODELS, which waits for the input's shape."""

    default: str = ""

    def read(self, value: Any, where: str, mistakes: list[str]) -> Part | None:
        """Read the network's part."""
        reader = Member(MODELS, self.default, 1, later=("num_classes",))
        part = reader.read(value, where, mistakes)
        if part is not None and not is_dtype(dtype := part.settings.get("dtype")):
            mistakes.append(
                f"{where}.dtype must be None or the name of a floating dtype, got "
                f"{dtype!r}."
            )
        return part


@section
class NetworkConfig(NamedTuple):
    """Keys of config.model, those of a network alone."""

    network: Annotated[Part, NetworkReader(), INLINE]


@section
class ClassifierConfig(NamedTuple):
    """Keys of config.model in classification."""

    network: Annotated[Part, NetworkReader(), INLINE]
    projection: Width | None = None  # of two layers before the last


class BuiltNetwork(NamedTuple):
    """A model with the shapes of what it gives for one image."""

    model: Model
    output: jax.ShapeDtypeStruct  # [1, ...]
    features: jax.ShapeDtypeStruct | None


def build_network(
    network: Part, input_shape: InputShape, projection: int | None = None
) -> BuiltNetwork:
    """Build a network, and trace it on one input.

    Raises:
      ValueError: for settings that make no network, or one that cannot run.
    """
    model, config = network(input_shape), network.section
    if projection is not None:
        with naming(network.where):
            model = with_projection(model, projection=projection)
        config["projection"] = projection
    model = model._replace(config=model.config or config)
    if (size := model.embedding_dim) < 1:
        raise ValueError(f"config.model must have at least one output, got {size}.")
    run = model.apply_with_features or model.apply
    image = input_structs(input_shape)
    with naming("config.model", config):
        variables = jax.eval_shape(model.init, jax.random.key(0))
        check_sizes(variables)
        output, *features, _ = jax.eval_shape(
            lambda v, x: run(v, x, False), variables, image
        )
    return BuiltNetwork(gather(model), output, features[0] if features else None)


def is_dtype(dtype: Any) -> bool:
    """Whether it is None or the name of a floating dtype."""
    if dtype is None:
        return True
    if isinstance(dtype, str | type | jnp.dtype):
        with contextlib.suppress(TypeError, ValueError, SyntaxError):  # NumPy's
            return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    return False


def check_sizes(variables: PyTree) -> None:
    """Raise ValueError for an array with more elements than int32 can count."""
    largest = max(jax.tree.leaves(variables), key=lambda leaf: math.prod(leaf.shape))
    if math.prod(largest.shape) > MAX:
        raise ValueError(
            f"config.model must have arrays of fewer than 2**31 elements, got one of "
            f"shape {largest.shape}."
        )


# Modules that must fit where both networks have them.
TRUNK = ("stem", "stage", "down", "patches", "positions", "prefix", "encoder")


@section
class StartConfig(NamedTuple):
    """Keys of config.pretrain in tasks that pretrain nothing."""

    init: Any = None  # file of weights, or run


def initialized(facts: Facts, config: StartConfig) -> Facts:
    """Replace modules of the initial variables by those of `pretrain.init`.

    Raises:
      ValueError: for weights that share no module with the network, or a module only
        in parts: names the leaf.
    """
    if config.init is None:
        return facts
    with naming("config.pretrain.init"):
        initial = with_modules(facts.initial(), our_names(load_weights(config.init)))
    return facts._replace(initial=lambda: initial)


def our_names(weights: Weights) -> dict[str, np.ndarray]:
    """Weights by our names, such as params/stem/conv/kernel, converted from
    PyTorch's.
    """
    if any(name.startswith("params/") for name in weights.arrays):
        return weights.arrays
    return named_arrays(convert_variables(weights, *detect_model(weights)))


def with_modules(variables: PyTree, arrays: Mapping[str, np.ndarray]) -> PyTree:
    """Replace the modules of `variables` that `arrays` has.

    Args:
      arrays: by our names, see `our_names`.
    """
    blocks = by_block_name(variables)
    leaves, fits = trees.by_name(blocks), {}
    arrays = resized(arrays, {name: np.shape(leaf) for name, leaf in leaves.items()})
    for name, leaf in leaves.items():
        is_same = name in arrays and np.shape(arrays[name]) == leaf.shape
        fits.setdefault(_module(name), {})[name] = is_same
    modules = {_module(name) for name in arrays}
    is_taken = lambda module: any(fits[module].values()) or module.startswith(TRUNK)
    taken = [module for module in fits if module in modules and is_taken(module)]
    for name in sorted({*arrays, *leaves}):
        if _module(name) in taken and not fits[_module(name)].get(name):
            must, actual = (
                np.shape(x[name]) if name in x else "absent" for x in (leaves, arrays)
            )
            raise ValueError(
                f"weights must fit the model: {name} must be {must}, got {actual}."
            )
    if not taken:
        raise ValueError(
            f"weights must have modules of the model, {sorted(fits)}, got "
            f"{sorted(modules)[:9]}."
        )
    if meshes.is_first_process():
        new = ", ".join(sorted(fits.keys() - {*taken})) or "none"
        print(f"Initial weights of {', '.join(taken)}; new are {new}.", flush=True)
    leaf = lambda name, x: jnp.asarray(arrays[name], x.dtype)
    one = lambda path, x: (
        leaf(name, x) if _module(name := trees.path_name(path)) in taken else x
    )
    return unstack_like(jax.tree_util.tree_map_with_path(one, blocks), variables)


def _module(name: str) -> str:
    """Name of the module: "stem" of params/stem/conv/kernel."""
    return name.split("/")[1]
