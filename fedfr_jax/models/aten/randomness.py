"""Operators of random numbers; `draw()` is a key of their place in the network."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.models.aten.tensors import (
    Tensor,
    array_of,
    elementwise,
    order_of,
    ordered,
    plain,
)


def dropout(x: Tensor, p: float, *, draw: Callable[[], jax.Array]) -> Tensor:
    """Zero a share p of the numbers, and scale the others."""
    keep = jax.random.bernoulli(draw(), 1 - p, array_of(x).shape)
    if p == 1:
        return elementwise(jnp.zeros_like)(x)
    y = jnp.where(keep, array_of(x) / (1 - p), 0)
    return ordered(y, order_of(x))


def _native_dropout(x, p, train, *, draw):
    return (dropout(x, p, draw=draw) if train and p else x,)


def _bernoulli(x, p=None, *, draw):
    x = plain(x)
    return jax.random.bernoulli(draw(), x if p is None else p, x.shape).astype(x.dtype)


def _like(sample):
    return lambda x, *, draw, **_: sample(draw(), x.shape, x.dtype)


def _of_size(sample):
    return lambda size, *, draw, **_: sample(draw(), tuple(size))


OPERATORS = {
    "bernoulli": _bernoulli,
    "native_dropout": _native_dropout,
    "rand": _of_size(jax.random.uniform),
    "rand_like": _like(jax.random.uniform),
    "randn": _of_size(jax.random.normal),
    "randn_like": _like(jax.random.normal),
}
