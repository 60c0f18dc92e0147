"""Parameter selection by blocks, batch norms or patterns."""

from collections.abc import Callable, Mapping

import jax

from fedfr_jax.federated.algorithms.batch_stats import batch_norms
from fedfr_jax.federated.algorithms.personal import top_blocks
from fedfr_jax.schema import check_keys
from fedfr_jax.types import Model, PyTree

KEYS = ("blocks", "all_but_blocks", "batch_norms")


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
      ValueError: for another key, none or several, or so many blocks.
    """
    if isinstance(selection, str):
        return selection
    check_keys(key, selection, KEYS)
    if len(selection) != 1:
        raise ValueError(
            f"{key} must have exactly one key of {KEYS}, got {dict(selection)}."
        )
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
            f"frozen must have a key of {KEYS[:2]} or be a pattern, got {selection}."
        )
    return pattern
