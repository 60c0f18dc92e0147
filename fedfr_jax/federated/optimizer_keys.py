"""Random keys in the states of optimizers, such as of `optax.add_noise`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.types import PyTree


def fold_in_keys(state: PyTree, key: jax.Array) -> PyTree:
    """Make every random key in an optimizer's state depend on `key` too.

    A client's optimizer starts anew in every round: from a seed alone it would draw the
    same numbers for all clients in all rounds.
    """

    def fold(x):
        return jax.random.fold_in(x, jax.random.bits(key)) if is_key(x) else x

    return jax.tree.map(fold, state)


def with_raw_keys(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Wrap an optimizer so that keys in its state are numbers, which can be stored."""

    def init(params):
        return _unwrap(optimizer.init(params))

    def update(updates, state, params: Any = None):
        typed = optimizer.init(params)  # for the kinds of its keys
        steps, state = optimizer.update(
            updates, jax.tree.map(_wrap, typed, state), params
        )
        return steps, _unwrap(state)

    return optax.GradientTransformation(init, update)


def _unwrap(state: PyTree) -> PyTree:
    """Typed keys as their numbers."""
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if is_typed_key(x) else x, state
    )


def _wrap(like: jax.Array, x: jax.Array) -> jax.Array:
    """Numbers of a key as a typed one, where `like` is."""
    if not is_typed_key(like):
        return x
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(like))


def is_typed_key(x: jax.Array) -> bool:
    """Whether it is a key of `jax.random.key`."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_key(x: jax.Array) -> bool:
    """Whether a leaf is a random key, typed or raw as of `jax.random.PRNGKey`."""
    is_raw = isinstance(x, jax.Array) and (x.dtype, x.shape) == (jnp.uint32, (2,))
    return is_raw or is_typed_key(x)
