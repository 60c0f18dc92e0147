"""Initial weights of classification, re-identification and segmentation.

config.pretrain.init names a file or another run. Modules with the same names ("stem",
"stage1", ...) are initialized with its weights; modules that it lacks, or whose last
layer is for other classes, are initialized randomly, and its other modules are ignored.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.models.external_checkpoints import convert_variables, detect_model
from fedfr_jax.models.saved_model import load_weights, named_arrays
from fedfr_jax.models.weights import Weights
from fedfr_jax.parts import section
from fedfr_jax.scanned_blocks import by_block_name, unstack_like
from fedfr_jax.schema import naming
from fedfr_jax.tasks.trainers import Facts
from fedfr_jax.types import PyTree

TRUNK = ("stem", "stage")  # modules that must fit where both networks have them


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
    leaves, fits = _leaves(blocks), {}
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


def _leaves(tree: PyTree) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {trees.path_name(path): leaf for path, leaf in leaves}


def _module(name: str) -> str:
    """Name of the module: "stem" of params/stem/conv/kernel."""
    return name.split("/")[1]
