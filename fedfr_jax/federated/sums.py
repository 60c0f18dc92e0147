"""Sums over clients, of plain arrays and of `LogScaled` trees.

A `LogScaled` tree represents e^log times its arrays. Two are added at the larger log,
the smaller one scaled down, as in an online softmax (Milakov & Gimelshein 2018,
arXiv:1805.02867, algorithm 3): weights such as e^margin neither overflow nor all vanish
however large margins are, and the sum stays one model of memory. A log may have leading
axes, which are those of its arrays too.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.types import LogScaled, PerClient, PyTree


def zero_sums(shapes: PyTree, *leading: int) -> PyTree:
    """Zero sums like `shapes`, arrays or ShapeDtypeStructs, with `leading` axes."""

    def nothing(x):
        empty = jax.tree.map(lambda y: jnp.zeros((*leading, *y.shape), y.dtype), x)
        if not is_scaled(x):
            return empty
        return empty._replace(log=jnp.full_like(empty.log, -jnp.inf))

    return jax.tree.map(nothing, shapes, is_leaf=is_scaled)


def add_sums(a: PyTree, b: PyTree) -> PyTree:
    """Add two sums."""

    def add(x, y):
        if not is_scaled(x):
            return x + y
        top = jnp.maximum(x.log, y.log)
        parts = round_down(x, top), round_down(y, top)
        return LogScaled(top, jax.tree.map(jnp.add, *parts))

    return jax.tree.map(add, a, b, is_leaf=is_scaled)


def over_lanes(tree: PyTree) -> PyTree:
    """Sum over the leading axis."""
    return _summed(tree, lambda x: x.max(0), lambda x: x.sum(0, dtype=x.dtype))


def over_clients(mesh: Mesh, tree: PyTree) -> PyTree:
    """Sum over the `clients` devices, within a shard_map over them."""
    return _summed(
        tree,
        lambda x: meshes.max_over_clients(mesh, x),
        lambda x: meshes.sum_over_clients(mesh, x),
    )


def without_kept(summary: PyTree) -> tuple[PyTree, list]:
    """(`summary` with its `PerClient` parts emptied, their contents)."""
    contents = []

    def remove(x):
        if not _is_kept(x):
            return x
        contents.append(x.tree)
        return PerClient(())

    return jax.tree.map(remove, summary, is_leaf=_is_kept), contents


def with_kept(total: PyTree, contents: list) -> PyTree:
    """Inverse of `without_kept`, for sums and trees of [K, ...]."""
    trees = iter(contents)
    restore = lambda x: PerClient(next(trees)) if _is_kept(x) else x
    return jax.tree.map(restore, total, is_leaf=_is_kept)


def _is_kept(x) -> bool:
    return isinstance(x, PerClient)


def is_scaled(x) -> bool:
    """Whether `x` is a `LogScaled` tree."""
    return isinstance(x, LogScaled)


def arrays_of(tree: PyTree) -> list:
    """Arrays of a tree, without the logs of `LogScaled` trees."""
    nodes = jax.tree.leaves(tree, is_leaf=is_scaled)
    return jax.tree.leaves([x.tree if is_scaled(x) else x for x in nodes])


def round_down(x: LogScaled, top: jax.Array) -> PyTree:
    """Rescale the arrays of `x` to log `top`, at least its own; -inf means zero."""
    factor = jnp.exp(jnp.where(x.log == top, 0, x.log - top))

    def scale(y):
        own_axes = (1,) * (y.ndim - factor.ndim)
        return y * factor.reshape(factor.shape + own_axes).astype(y.dtype)

    return jax.tree.map(scale, x.tree)


def _summed(tree: PyTree, largest: Callable, total: Callable) -> PyTree:
    def sum_node(x):
        if not is_scaled(x):
            return total(x)
        top = largest(x.log)
        at_top = round_down(x, jnp.broadcast_to(top, x.log.shape))
        return LogScaled(top, jax.tree.map(total, at_top))

    return jax.tree.map(sum_node, tree, is_leaf=is_scaled)
