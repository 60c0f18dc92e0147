"""Distances between changes of clients, over all leaves together."""

import jax
import jax.numpy as jnp

from fedfr_jax.types import PyTree


def distances_to(center: PyTree, changes: PyTree) -> jax.Array:
    """Euclidean distance of every change to a tree like one of them, [K]."""

    def squares(x, c):
        return jnp.sum(jnp.square(x - c[None]), axis=tuple(range(1, x.ndim)))

    return jnp.sqrt(sum(jax.tree.leaves(jax.tree.map(squares, changes, center))))


def squared_distances(changes: PyTree) -> jax.Array:
    """Squared distances between all changes, [K, K], over all leaves together."""
    one = lambda x: distances_to(x, changes) ** 2
    return jax.lax.map(one, changes)
