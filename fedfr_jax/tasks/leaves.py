"""Parameter selection by blocks, batch norms or patterns."""

from collections.abc import Callable, Mapping

import jax

from fedfr_jax.federated.algorithms.batch_stats import batch_norms
from fedfr_jax.federated.algorithms.personal import top_blocks
from fedfr_jax.ranges import Count, Whole
from fedfr_jax.schema import check_settings
from fedfr_jax.types import Model, PyTree

KINDS = {"blocks": Whole, "all_but_blocks": Count, "batch_norms": bool}


def check_leaves(key: str, selection: str | Mapping) -> None:
    """Check a selection of leaves, but for what the model has.

    Args:
      key: of the method, for errors.
      selection: a pattern, or one of the keys of KINDS with its value.
    """
    if isinstance(selection, str):
        return
    check_settings(key, selection, KINDS)
    if len(selection) != 1:
        raise ValueError(
            f"{key} must have exactly one key of {(*KINDS,)}, got {dict(selection)}."
        )


def leaves_of(
    model: Model, selection: str | Mapping, at: str = "", *, key: str = "personal"
) -> str | Callable:
    """Select leaves by a regular expression over paths, or by a mapping.

    {"blocks": K} is the top K blocks (FedPer; 1 is the head), {"all_but_blocks": K} the
    others (LG-FedAvg), {"batch_norms": True} all of every batch norm (FedBN).

    Args:
      at: where the network's params lie below params, such as "backbone/".
      key: the row's key, for errors.

    Raises:
      ValueError: for so many blocks.
    """
    if isinstance(selection, str):
        return selection
    check_leaves(key, selection)
    ((which, value),) = selection.items()
    if which == "batch_norms":
        return batch_norms_at(at) if value else ""
    top = top_blocks(model.blocks, value, prefix=at)
    if which == "blocks":
        return top
    if not 0 < value < len(model.blocks):
        raise ValueError(
            f"all_but_blocks must be in [1, {len(model.blocks) - 1}], got {value!r}."
        )
    return f"^(?=params/{at}|batch_stats/)(?!{top.removeprefix('^')})"


def batch_norms_at(at: str) -> Callable:
    """`batch_norms` of a model whose params are `at` a path below params."""
    name = at.removesuffix("/")
    if not name:
        return batch_norms

    def select(variables: PyTree) -> PyTree:
        params = variables["params"]
        selected = batch_norms({**variables, "params": params[name]})
        others = jax.tree.map(lambda _: False, params)
        return {**selected, "params": {**others, name: selected["params"]}}

    return select


def frozen_pattern(model: Model, selection: str | Mapping, at: str = "") -> str:
    """Pattern of the key `frozen`: as `leaves_of`, without batch norms.

    Raises:
      ValueError: for anything else.
    """
    pattern = leaves_of(model, selection, at, key="frozen")
    if not isinstance(pattern, str):
        raise ValueError(
            "frozen must have the key blocks or all_but_blocks or be a pattern, got "
            f"{selection}."
        )
    return pattern
