"""A network's many small leaves as one vector, so that rounds compile sooner.

Every leaf costs a round a dozen kernels (momentum, step, update, sum, average). Most
leaves of a deep network are the vectors of its normalisations, and the kernels of all
but the widest stages are small too. A step copies what is bundled, and a network that
is cut over devices gathers it at once.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax.types import Model, PyTree

LARGEST = 2**20  # elements of a leaf that is bundled; a step copies each once
FEWEST = 32  # leaves; below, a round compiles fast as it is


class Bundled(NamedTuple):
    """A model on bundled variables, and the way from and to named ones."""

    model: Model
    bundle: Callable[[PyTree], PyTree]
    unbundle: Callable[[PyTree], PyTree]


def bundled(model: Model) -> Bundled:
    """`model` with the small leaves of a collection in one vector "small" [P].

    The others stay at their names under "large", each one long axis, whose kernels
    compile sooner. A collection of few small leaves, or of several dtypes, stays as it
    is.
    """
    every = jax.eval_shape(model.init, jax.random.key(0))
    shapes = {name: tree for name, tree in every.items() if _is_worth_it(tree)}
    if not shapes:
        return Bundled(model, lambda x: x, lambda x: x)

    def bundle(variables):
        new = {name: _bundle(variables[name]) for name in shapes}
        return {**variables, **new}

    def unbundle(variables):
        new = {name: _unbundle(variables[name], x) for name, x in shapes.items()}
        return {**variables, **new}

    def apply(variables, x, train=False, key=None):
        features, stats = model.apply(unbundle(variables), x, train, key)
        return features, _bundle(stats) if "batch_stats" in shapes else stats

    init = lambda key: bundle(model.init(key))
    return Bundled(model._replace(init=init, apply=apply), bundle, unbundle)


def _is_worth_it(tree) -> bool:
    small = [x for x in jax.tree.leaves(tree) if _is_small(x)]
    return len(small) >= FEWEST and len({x.dtype for x in small}) == 1


def _is_small(x) -> bool:
    return x.size <= LARGEST


def _bundle(tree):
    """{"large": tree of vectors, None for small leaves, "small": [P]}."""
    small = [x.ravel() for x in jax.tree.leaves(tree) if _is_small(x)]
    large = jax.tree.map(lambda x: None if _is_small(x) else x.ravel(), tree)
    return {"large": large, "small": jnp.concatenate(small)}


def _unbundle(bundle, shapes):
    """The inverse; `shapes` names the leaves."""
    small = [x for x in jax.tree.leaves(shapes) if _is_small(x)]
    # Whose derivative is one concatenation.
    parts = iter(jax.lax.split(bundle["small"], [x.size for x in small]))
    large = iter(jax.tree.leaves(bundle["large"]))
    take = lambda x: next(parts if _is_small(x) else large).reshape(x.shape)
    return jax.tree.map(take, shapes)
