"""Variables by what happens to them: sent and averaged, or kept by the client.

Variables are {"params", "batch_stats"}. Under `personal` they have a third collection
"local", with the client's own leaves of both. Leaves that belong elsewhere are None in
either part, so that all parts keep the names of the whole.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax import stacks
from fedfr_jax.types import PyTree

LOCAL = "local"


def split(mask: PyTree, tree: PyTree) -> tuple[PyTree, PyTree]:
    """Leaves of `tree` where the static `mask` is True, and the others."""
    chosen = jax.tree.map(lambda m, x: x if m else None, mask, tree)
    others = jax.tree.map(lambda m, x: None if m else x, mask, tree)
    return chosen, others


def join(first: PyTree, second: PyTree) -> PyTree:
    """The inverse of `split`: each leaf from the part that has it."""
    pick = lambda x, y: y if x is None else x
    return jax.tree.map(pick, first, second, is_leaf=_is_none)


def like(part: PyTree, whole: PyTree) -> PyTree:
    """Those leaves of `whole` that `part` has."""
    pick = lambda x, y: None if x is None else y
    return jax.tree.map(pick, part, whole, is_leaf=_is_none)


def without(part: PyTree, whole: PyTree) -> PyTree:
    """Those leaves of `whole` that `part` lacks."""
    pick = lambda x, y: y if x is None else None
    return jax.tree.map(pick, part, whole, is_leaf=_is_none)


def shared(variables: PyTree) -> PyTree:
    """What is sent: `variables` without a client's own leaves."""
    return {name: x for name, x in variables.items() if name != LOCAL}


def own(variables: PyTree) -> PyTree:
    """A client's own leaves, () where it keeps none."""
    return variables.get(LOCAL, ())


def with_own(variables: PyTree, leaves: PyTree) -> PyTree:
    """`variables` with a client's own `leaves`, beside those that they have already.

    The leaves may be in longer stacks of blocks than those of `variables`.
    """
    leaves = stacks.laid_out(leaves, shared(variables))
    if LOCAL in variables:
        leaves = join(variables[LOCAL], leaves)
    return {**variables, LOCAL: leaves}


def change(end: PyTree, start: PyTree) -> PyTree:
    """`end` minus `start`, both variables, of what is sent."""
    return jax.tree.map(jnp.subtract, shared(end), shared(start))


def merged(variables: PyTree) -> PyTree:
    """The network that a loss sees: shared leaves and own ones in their places."""
    if LOCAL not in variables:
        return variables
    return join(shared(variables), variables[LOCAL])


def cut(whole: PyTree, variables: PyTree) -> PyTree:
    """Inverse of `merged`: `whole` with its leaves where `variables` have them."""
    parts = like(shared(variables), whole)
    if LOCAL not in variables:
        return parts
    return {**parts, LOCAL: like(variables[LOCAL], whole)}


def is_variables(tree: PyTree) -> bool:
    """Whether `tree` is a network's variables."""
    return isinstance(tree, dict) and {"params", "batch_stats"} <= tree.keys()


def in_networks(tree: PyTree, function: Callable[[PyTree], PyTree]) -> PyTree:
    """`tree`, a server's state, with `function` applied to each network in it."""
    apply = lambda x: function(x) if is_variables(x) else x
    return jax.tree.map(apply, tree, is_leaf=is_variables)


def own_in_networks(tree: PyTree) -> PyTree:
    """Own leaves of the first network in `tree`, a server's state, that has some."""
    networks = filter(is_variables, jax.tree.leaves(tree, is_leaf=is_variables))
    return next(filter(None, map(own, networks)), ())


def _is_none(x) -> bool:
    return x is None
