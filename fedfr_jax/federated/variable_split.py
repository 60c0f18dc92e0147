"""Shared and personal variables: split and join.

Variables are {"params", "batch_stats"}. Under `personal` they have a third collection
"local", with the client's own leaves of both. Leaves that belong elsewhere are None in
either part, so that all parts keep the names of the whole.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax import scanned_blocks, trees
from fedfr_jax.types import ClientOutput, PyTree

PERSONAL = "local"


def select_like(part: PyTree, whole: PyTree) -> PyTree:
    """Leaves of `whole` that `part` has."""
    pick = lambda x, y: None if x is None else y
    return jax.tree.map(pick, part, whole, is_leaf=_is_none)


def drop_like(part: PyTree, whole: PyTree) -> PyTree:
    """Leaves of `whole` that `part` lacks."""
    pick = lambda x, y: y if x is None else None
    return jax.tree.map(pick, part, whole, is_leaf=_is_none)


def shared(variables: PyTree) -> PyTree:
    """Shared variables: `variables` without a client's personal leaves."""
    return {name: x for name, x in variables.items() if name != PERSONAL}


def personal_variables(variables: PyTree) -> PyTree:
    """A client's personal leaves, () if there are none."""
    return variables.get(PERSONAL, ())


def whole_variables(variables: PyTree) -> PyTree:
    """Variables of the whole model: shared and personal leaves, joined."""
    if PERSONAL not in variables:
        return variables
    return trees.join(shared(variables), variables[PERSONAL])


def with_personal(variables: PyTree, leaves: PyTree) -> PyTree:
    """Add personal `leaves` to `variables`, next to those already there.

    The leaves may be in longer stacks of blocks than those of `variables`.
    """
    leaves = scanned_blocks.unstack_like(leaves, shared(variables))
    if PERSONAL in variables:
        leaves = trees.join(variables[PERSONAL], leaves)
    return {**variables, PERSONAL: leaves}


def update_of(end: PyTree, start: PyTree) -> PyTree:
    """Difference `end` - `start` of the shared variables."""
    return jax.tree.map(jnp.subtract, shared(end), shared(start))


def init_from_received(key: jax.Array, server: PyTree) -> PyTree:
    """Personal state of a client that begins with the model it receives."""
    del key
    return whole_variables(server.variables)


def client_output(
    start: PyTree, end: PyTree, weight: PyTree, personal: PyTree, metrics, **fields
) -> ClientOutput:
    """Output of a client that has trained the variables `start` to `end`."""
    return ClientOutput(
        update=update_of(end, start),
        weight=weight,
        personal=personal,
        metrics=metrics,
        personal_variables=personal_variables(end),
        **fields,
    )


def split_paths(whole: PyTree, variables: PyTree) -> PyTree:
    """Split `whole` into shared and personal leaves, structured as `variables`."""
    parts = select_like(shared(variables), whole)
    if PERSONAL not in variables:
        return parts
    return {**parts, PERSONAL: select_like(variables[PERSONAL], whole)}


def is_variables(tree: PyTree) -> bool:
    """Whether `tree` is the variables of a model."""
    return isinstance(tree, dict) and {"params", "batch_stats"} <= tree.keys()


def in_models(tree: PyTree, function: Callable[[PyTree], PyTree]) -> PyTree:
    """Apply `function` to each model's variables in `tree`, a server's state."""
    apply = lambda x: function(x) if is_variables(x) else x
    return jax.tree.map(apply, tree, is_leaf=is_variables)


def personal_in_models(tree: PyTree) -> PyTree:
    """Personal leaves of the first model in `tree`, a server's state, that has any."""
    networks = filter(is_variables, jax.tree.leaves(tree, is_leaf=is_variables))
    return next(filter(None, map(personal_variables, networks)), ())


def _is_none(x) -> bool:
    return x is None
