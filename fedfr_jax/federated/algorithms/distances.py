"""Changes of clients: which are finite, and distances over all leaves together."""

import jax
import jax.numpy as jnp

from fedfr_jax.types import PyTree


def finite_clients(changes: PyTree) -> jax.Array:
    """Which clients' changes have no nan and no infinity in any leaf, [K] bool."""
    leaves = jax.tree.leaves(changes)
    fine = [jnp.isfinite(x).all(axis=tuple(range(1, x.ndim))) for x in leaves]
    return jnp.stack(fine).all(axis=0)


def masked(is_kept: jax.Array, changes: PyTree, value: float = 0) -> PyTree:
    """`changes` of [K, ...] with `value` in those of clients that are not kept."""

    def one(x):
        return jnp.where(is_kept.reshape(-1, *[1] * (x.ndim - 1)), x, value)

    return jax.tree.map(one, changes)


def mean_between(x: jax.Array, first, last) -> jax.Array:
    """Mean of x [K, ...] over the places [first, last), [] int, of its first axis."""
    place = jnp.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1))
    is_in = (place >= first) & (place < last)
    total = jnp.where(is_in, x, 0).sum(axis=0)
    return total / jnp.asarray(last - first, total.dtype)


def distances_to(center: PyTree, changes: PyTree) -> jax.Array:
    """Euclidean distance of every change to a tree like one of them, [K]."""

    def squares(x, c):
        return jnp.sum(jnp.square(x - c[None]), axis=tuple(range(1, x.ndim)))

    return jnp.sqrt(sum(jax.tree.leaves(jax.tree.map(squares, changes, center))))


def squared_distances(changes: PyTree) -> jax.Array:
    """Squared distances between all changes, [K, K], over all leaves together."""
    one = lambda x: distances_to(x, changes) ** 2
    return jax.lax.map(one, changes)
