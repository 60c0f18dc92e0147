"""Pytree helpers: paths, selection, counting."""

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedfr_jax import scanned_blocks
from fedfr_jax.scanned_blocks import block_paths
from fedfr_jax.types import AnyArray, PyTree

NEAR = 12  # names that an error lists
SMALL = 2**16  # numbers of a leaf that is joined with others


def path_name(path: tuple) -> str:
    """Name of a leaf's path: `params/stage3/conv1/kernel`."""
    return "/".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path)


def by_name(tree: PyTree) -> dict[str, Any]:
    """Leaves by the names of their paths, in the order of the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): leaf for path, leaf in leaves}


def count(tree: PyTree) -> int:
    """Number of elements in a tree of arrays or shapes."""
    return sum(x.size for x in jax.tree.leaves(tree))


def add(tree: PyTree, change: PyTree) -> PyTree:
    """Add `change` to `tree`, each leaf in its own dtype."""
    return jax.tree.map(lambda x, d: x + d.astype(x.dtype), tree, change)


def split(mask: PyTree, tree: PyTree) -> tuple[PyTree, PyTree]:
    """Split `tree` into the leaves where the static `mask` is True, and the others."""
    chosen = jax.tree.map(lambda m, x: x if m else None, mask, tree)
    rest = jax.tree.map(lambda m, x: None if m else x, mask, tree)
    return chosen, rest


def join(first: PyTree, second: PyTree) -> PyTree:
    """Inverse of `split`; `second` may lack what `first` has all of."""
    if isinstance(first, dict) and isinstance(second, dict):
        if unknown := second.keys() - first.keys():
            raise ValueError(f"trees to join must have the same keys, got {unknown}.")
        has = lambda key: key in second
        return {k: join(x, second[k]) if has(k) else x for k, x in first.items()}
    pick = lambda x, y: y if x is None else x
    return jax.tree.map(pick, first, second, is_leaf=lambda x: x is None)


def matching(pattern: str, *, min_leaves: int = 1) -> Callable[[PyTree], PyTree]:
    """Build a predicate: tree -> tree of bool, True where a path has `pattern`.

    Blocks are found by their names, stacked or not; `scanned_blocks.split_stacks`
    splits a stack of which only some blocks match.

    Raises:
      ValueError: when fewer than `min_leaves` leaves match, so that a renamed layer is
        noticed, or only some blocks of a stack.
    """
    try:
        find = re.compile(pattern).search
    except re.error as error:
        raise ValueError(
            f"path pattern must be a regular expression, got {pattern!r}: {error}."
        ) from error

    def matches_pattern(path, _):
        matches = {find(name) is not None for name in block_paths(path_name(path))}
        if len(matches) > 1:
            raise ValueError(
                f"path pattern must match all blocks of {path_name(path)} or none, got "
                f"{pattern!r}."
            )
        return matches.pop()

    def select(tree):
        matches = jax.tree_util.tree_map_with_path(matches_pattern, tree)
        if sum(jax.tree.leaves(matches)) < min_leaves:
            names = [name for path in by_name(tree) for name in block_paths(path)]
            near = difflib.get_close_matches(pattern, names, NEAR, cutoff=0)
            raise ValueError(
                f"path pattern must match a leaf such as {', '.join(near)}, got "
                f"{pattern!r}."
            )
        return matches

    return select


def scaling(factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Scale the updates of leaves: a learning rate per leaf, as the last link.

    Args:
      factors: {regular expression of paths below params: factor}.
    """

    def init(params):
        # `optax.tree_utils.tree_map_params` passes trees without leaves.
        if jax.tree.leaves(params):
            for pattern in factors:
                matching(pattern)(params)
        return optax.EmptyState()

    def scaled(updates, state, params=None):
        del params
        for pattern, factor in factors.items():
            mask = matching(pattern)(updates)
            scale = lambda m, x, factor=factor: factor * x if m else x
            updates = jax.tree.map(scale, mask, updates)
        return updates, state

    return optax.GradientTransformation(init, scaled)


def freeze(
    optimizer: optax.GradientTransformation, pattern: str
) -> optax.GradientTransformation:
    """Wrap `optimizer` so that parameters matching `pattern` are not updated.

    Args:
      pattern: regular expression over leaf paths such as `params/stem/conv/kernel`.
    """
    select = matching(pattern)

    def mask_of(tree):
        return select({"params": scanned_blocks.by_block_name(tree)})["params"]

    def init(params):
        # `optax.tree_utils.tree_map_params` passes trees without leaves.
        if jax.tree.leaves(params):
            mask_of(params)
        return optimizer.init(params)

    def update(updates, state, params=None):
        steps, state = optimizer.update(updates, state, params)
        named = scanned_blocks.by_block_name(steps)
        hold = lambda is_found, x: jnp.zeros_like(x) if is_found else x
        steps = jax.tree.map(hold, mask_of(steps), named)
        return scanned_blocks.unstack_like(steps, updates), state

    return optax.GradientTransformation(init, update)


def magnitude(tree: PyTree) -> jax.Array:
    """Power of two [] near the largest number of a tree, 1 for a tree of zeros.

    Squares of the tree divided by it do not overflow, and no bit is lost.
    """
    largest = jnp.array([jnp.abs(x).max(initial=0) for x in jax.tree.leaves(tree)])
    largest = largest.max(initial=0)
    largest = largest if largest.dtype.itemsize >= 4 else largest.astype(jnp.float32)
    bound = jnp.finfo(largest.dtype).maxexp - 2  # its reciprocal is a normal number
    _, exponent = jnp.frexp(largest)
    return jnp.ldexp(jnp.ones_like(largest), exponent.clip(-bound, bound))


def scaled_norm(tree: PyTree) -> tuple[jax.Array, jax.Array]:
    """(n, s) [] with n s the Euclidean norm of all leaves, s their `magnitude`."""
    size = magnitude(tree)
    scaled = jax.tree.map(lambda x: x.astype(size.dtype) * (1 / size), tree)
    return jnp.asarray(optax.tree.norm(scaled), size.dtype), size


def norm(tree: PyTree) -> jax.Array:
    """Euclidean norm [] of all leaves; their squares may overflow, the norm may not."""
    return jnp.multiply(*scaled_norm(tree))


def joined(tree: PyTree) -> list[jax.Array]:
    """All numbers of a tree in few arrays: small leaves of a dtype behind one another.

    A reduction of each leaf of a network compiles five times as long.
    """
    joined, small = [], defaultdict(list)
    for x in jax.tree.leaves(tree):
        if x.size < SMALL:
            small[x.dtype].append(x.ravel())
        else:
            joined.append(x)
    return joined + [jnp.concatenate(leaves) for leaves in small.values()]


def is_finite(tree: PyTree) -> jax.Array:
    """Whether all leaves of a tree of arrays are finite, [] bool."""
    return jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def where(condition: AnyArray, x: PyTree, y: PyTree) -> PyTree:
    """Select leafwise from `x` or `y` by a scalar condition."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), x, y)


def divide(tree: PyTree, number: jax.Array) -> PyTree:
    """Divide the floating leaves of `tree` by a number [], by its reciprocal.

    XLA turns some divisions into that, depending on other divisions by the number; then
    the last bit would depend on the surrounding program, and so on the devices.
    """
    return jax.tree.map(lambda x: x * (1 / number.astype(x.dtype)), tree)


def sum_dtype(dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    """Dtype for sums: float32, or float64 if `dtype` is float64."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def num_bytes(tree: PyTree) -> int:
    """Number of bytes of the leaves of `tree` (arrays or ShapeDtypeStructs)."""
    return sum(
        int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize
        for x in jax.tree.leaves(tree)
    )


def shapes(tree: PyTree, *leading: int) -> PyTree:
    """Shapes of the leaves of `tree`, behind `leading` axes."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*leading, *x.shape), x.dtype), tree
    )


def difference(a: PyTree, b: PyTree) -> str | None:
    """Describe the first leaf in which two trees differ in name, shape or dtype."""

    left, right = (
        {name: (tuple(x.shape), str(x.dtype)) for name, x in by_name(tree).items()}
        for tree in (a, b)
    )
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name):
            return f"{name}: {left.get(name)} against {right.get(name)}"
    return None
