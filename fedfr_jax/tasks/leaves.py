"""Parameter selection by blocks, batch norms or patterns."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from fedfr_jax.federated.algorithms.personal import batch_norms, top_blocks
from fedfr_jax.ranges import Count, Whole
from fedfr_jax.schema import check_settings
from fedfr_jax.types import Model, PyTree

BLOCKS = {"blocks": Whole, "all_but_blocks": Count}
KINDS = {**BLOCKS, "batch_norms": bool}


def check_leaves(
    key: str, selection: str | Mapping, kinds: Mapping[str, Any] = KINDS
) -> None:
    """Check a selection of leaves, but for what the model has.

    Args:
      key: of the method, for errors.
      selection: a pattern, or one of the keys of `kinds` with its value.
    """
    if isinstance(selection, str):
        return
    check_settings(key, selection, kinds)
    if len(selection) != 1:
        raise ValueError(
            f"{key} must have exactly one key of {(*kinds,)}, got {dict(selection)}."
        )


def leaves_of(
    model: Model, selection: str | Mapping, at: str = "", *, key: str = "personal"
) -> str | Callable:
    """Select leaves by a regular expression over paths, or by a mapping.

    {"blocks": K} is the top K blocks (FedPer; 1 is the head), {"all_but_blocks": K} the
    others (LG-FedAvg), {"batch_norms": True} all of every batch norm (FedBN).

    Args:
      at: where the network's params lie below params, such as "backbone/".
      key: of the method, for errors.

    Raises:
      ValueError: for more blocks than the model has.
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
    """Pattern of the key `frozen`: as `leaves_of`, without batch norms."""
    check_leaves("frozen", selection, BLOCKS)
    return leaves_of(model, selection, at, key="frozen")
