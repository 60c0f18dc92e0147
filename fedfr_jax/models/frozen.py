"""Models of which a part is frozen: it is none of their variables.

Whatever trains such a model (algorithms, optimizers, aggregation, privacy, checkpoints)
has the other leaves only. Frozen ones are a `Constant`: all lanes and steps of a round
share them, so that a product with a frozen matrix is one of all lanes' rows. A batch
norm whose running statistics are frozen is in evaluation.
"""

from collections.abc import Callable

import jax

from fedfr_jax import scanned_blocks, trees
from fedfr_jax.constants import Constant
from fedfr_jax.models.frozen_prefix import on_features
from fedfr_jax.models.norm import FROZEN
from fedfr_jax.ranges import Pattern
from fedfr_jax.schema import checked
from fedfr_jax.types import Model, PyTree


@checked
def with_frozen(model: Model, pattern: Pattern, variables: PyTree = None) -> Model:
    """Freeze the leaves of a model that `pattern` matches.

    The variables of the result are the other leaves, None in the places of frozen ones:
    `ff.moving_variables(model, variables)`, or `model.init(key)`.

    Args:
      pattern: regular expression over leaf paths such as `params/stem`. Running
        statistics are frozen with the parameters of their layer.
      variables: of the model, of which the frozen leaves are taken; None leaves them to
        `set_frozen`.

    Raises:
      ValueError: for a pattern that matches no leaf, or all.
    """
    select, mask = _selection(pattern), None

    def draw(key):
        nonlocal mask
        variables, mask = scanned_blocks.split_stacks(model.init(key), select)
        return variables

    shapes = jax.eval_shape(draw, jax.random.key(0))
    frozen, moving = trees.split(mask, shapes)
    if not jax.tree.leaves(moving["params"]):
        raise ValueError(
            f"frozen must leave a parameter that is trained, got {pattern!r}, which "
            "matches all."
        )
    constant = Constant(frozen)
    result = model.wrapped(_with_leaves(constant))._replace(
        init=lambda key: moving_variables(result, model.init(key)), frozen=constant
    )
    result = on_features(result)
    if variables is not None:
        set_frozen(result, variables)
    return result


def _selection(pattern: str) -> Callable[[PyTree], PyTree]:
    """Variables -> mask of the leaves that a pattern freezes."""
    find, find_any = trees.matching(pattern), trees.matching(pattern, min_leaves=0)

    def select(variables):
        params = find({"params": variables["params"]})["params"]
        stats = find_any({"batch_stats": variables["batch_stats"]})["batch_stats"]
        leaves = jax.tree_util.tree_leaves_with_path(params)
        layers = {path[:-1] for path, is_frozen in leaves if is_frozen}
        # Params of faces lie below "backbone", their statistics do not.
        inside = (jax.tree_util.DictKey("backbone"),)
        layers |= {path[1:] for path in layers if path[:1] == inside}
        of_layer = lambda path, is_frozen: is_frozen or path[:-1] in layers
        stats = jax.tree_util.tree_map_with_path(of_layer, stats)
        return {"params": params, "batch_stats": stats}

    return select


def _with_leaves(constant: Constant) -> Callable[[Callable], Callable]:
    """Wrap functions of all variables as functions of those that are not frozen."""

    def wrap(function):
        def call(variables, x, train=False, key=None):
            frozen = scanned_blocks.unstack_like(constant.value, variables)
            whole, running = trees.join(variables, frozen), frozen["batch_stats"]
            if jax.tree.leaves(running):
                whole[FROZEN] = running
            *outputs, stats = function(whole, x, train, key=key)
            is_moving = lambda fixed, x: x if fixed is None else None
            stats = jax.tree.map(is_moving, running, stats, is_leaf=_is_none)
            return *outputs, stats

        return call

    return wrap


def set_frozen(model: Model, variables: PyTree) -> None:
    """Take the frozen leaves of a model from all its variables."""
    constant = model.frozen
    whole = scanned_blocks.unstack_like(variables, constant.shapes)
    pick = lambda shape, x: None if shape is None else x
    constant.set(jax.tree.map(pick, constant.shapes, whole, is_leaf=_is_none))


def moving_variables(model: Model, variables: PyTree) -> PyTree:
    """The variables of a model with frozen leaves, of all of its network."""
    if model.frozen is None:
        return variables
    whole = scanned_blocks.unstack_like(variables, model.frozen.shapes)
    pick = lambda shape, x: x if shape is None else None
    return jax.tree.map(pick, model.frozen.shapes, whole, is_leaf=_is_none)


def whole_variables(model: Model, variables: PyTree) -> PyTree:
    """All variables of a network, of those of a model with frozen leaves."""
    if model.frozen is None:
        return variables
    frozen = scanned_blocks.unstack_like(model.frozen.value, variables)
    return trees.join(variables, frozen)


def _is_none(x) -> bool:
    return x is None
