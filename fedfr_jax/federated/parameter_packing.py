"""Parameter packing: many small leaves as one vector in an algorithm's state.

Every leaf costs a round a dozen kernels (momentum, step, update, sum, average), which
are compiled. Most leaves of a deep network are the vectors of its normalizations, and
the kernels of all but the widest stages are small too. Around the algorithm networks
have named leaves: they are packed as it begins and unpacked as it hands them out.
Optimizers in it must move every number by its own gradients, as SGD does.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedfr_jax.federated import variable_split
from fedfr_jax.federated.model_parallel import gather
from fedfr_jax.types import Algorithm, Model, PyTree

MAX_LEAF_SIZE = 2**20  # elements of a leaf that is packed; a step copies each once
MIN_LEAVES = 32  # leaves; below, a round compiles fast as it is


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["small", "large"],
    meta_fields=["shapes"],
)
@dataclass(frozen=True)  # JAX has no other tree with a static part
class PackedVariables:
    """A collection of variables with its small leaves packed into one vector."""

    small: jax.Array  # [P] all small leaves, end to end
    large: PyTree  # the others, each one long axis, at their places
    shapes: Any  # static: (structure of the collection, shapes of its leaves)


def pack_variables(algorithm: Algorithm, at: str = "") -> Algorithm:
    """Wrap an algorithm, which must not access leaves, to work on packed variables.

    Args:
      at: the place among params of a network that alone is packed; "" is all of them.

    Its loss and `prepare` see them packed and apply a model of `on_unpacked`.
    """

    def personalize(server, row):
        return unpack(algorithm.personalize(server, row))

    return algorithm._replace(
        init=lambda variables: algorithm.init(pack_networks(variables, at)),
        personalize=personalize,
        global_model=lambda server: unpack(algorithm.global_model(server)),
    )


def on_unpacked(model: Model) -> Model:
    """Wrap a model to take packed variables too, and then return packed statistics."""

    def wrapped(function):
        def call(variables, x, *mode, **key):
            *outputs, stats = function(unpack(variables), x, *mode, **key)
            was_packed = isinstance(variables["batch_stats"], PackedVariables)
            return *outputs, pack(stats) if was_packed else stats

        return call

    # Gathered first: a vector that is cut over devices must be whole before the split.
    return gather(model.wrapped(wrapped))


def pack_networks(tree: PyTree, at: str = "") -> PyTree:
    """Pack each model in `tree`, a collection at a time; see `pack`."""

    def each(variables):
        if not at:
            return {name: pack(x) for name, x in variables.items()}
        params = {**variables["params"], at: pack(variables["params"][at])}
        return {"params": params, "batch_stats": pack(variables["batch_stats"])}

    return variable_split.in_models(tree, each)


def pack(tree: PyTree) -> PyTree:
    """Pack a collection to `PackedVariables` if it has many small leaves."""
    leaves, structure = jax.tree.flatten(tree)
    small = [x for x in leaves if _is_small(x.shape)]
    if len(small) < MIN_LEAVES or len({x.dtype for x in small}) > 1:
        return tree
    large = jax.tree.map(lambda x: None if _is_small(x.shape) else x.ravel(), tree)
    vector = jnp.concatenate([x.ravel() for x in small])
    return PackedVariables(vector, large, (structure, tuple(x.shape for x in leaves)))


@partial(jax.jit, inline=True)
def unpack(tree: PyTree) -> PyTree:
    """Unpack everything in `tree` to named leaves."""
    is_packed = lambda x: isinstance(x, PackedVariables)
    each = lambda x: _unpacked(x) if is_packed(x) else x
    return jax.tree.map(each, tree, is_leaf=is_packed)


def _unpacked(packed):
    structure, shapes = packed.shapes
    sizes = [math.prod(shape) for shape in shapes if _is_small(shape)]
    # Whose derivative is one concatenation.
    parts = iter(jax.lax.split(packed.small, sizes))
    large = iter(jax.tree.leaves(packed.large))
    take = lambda shape: next(parts if _is_small(shape) else large).reshape(shape)
    return structure.unflatten([take(shape) for shape in shapes])


def _is_small(shape) -> bool:
    return math.prod(shape) <= MAX_LEAF_SIZE
