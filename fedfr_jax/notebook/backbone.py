"""The backbone in the variables that a client or the server deploys."""

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.stacks import named
from fedfr_jax.types import PyTree


def backbone_of(variables, template) -> PyTree | None:
    """The variables of a network like `template` in what is deployed, None without."""
    names = lambda tree: {
        trees.path_name(p): jnp.shape(x)
        for p, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    wanted = names(jax.eval_shape(named, template))
    if names(named(variables)) == wanted:
        return variables
    params = variables.get("params", {})
    if "backbone" in params and "branch" not in params:
        return backbone_of({**variables, "params": params["backbone"]}, template)
    return None
