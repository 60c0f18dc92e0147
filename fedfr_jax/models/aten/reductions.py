"""Sums, extremes and softmax over axes of a tensor."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.models.aten.tensors import elementwise, on_axis, on_plain, over_axes


def _typed(function: Callable) -> Callable:
    """Reduction (array, axes, keepdims) of numbers in another dtype."""

    def reduce(x, axes, keepdims, dtype=None):
        x = x if dtype is None else x.astype(dtype)
        return function(x, axis=axes, keepdims=keepdims)

    return over_axes(reduce)


def _softmax(function: Callable) -> Callable:
    def apply(x, axis, dtype=None):
        return function(x if dtype is None else x.astype(dtype), axis)

    return on_axis(apply)


def _spread(root: bool) -> dict[str, Callable]:
    """Variance, or its root, with the arguments of each overload."""

    def reduce(x, axes, keepdims, correction):
        ddof = 1 if correction is None else correction
        y = jnp.var(x, axes, ddof=ddof, keepdims=keepdims)
        return jnp.sqrt(y) if root else y

    over = over_axes(reduce)

    def correction(x, dim=None, *, correction=None, keepdim=False):
        return over(x, dim, keepdim, correction=correction)

    def dim(x, dim, unbiased=True, keepdim=False):
        return over(x, dim, keepdim, correction=int(unbiased))

    def default(x, unbiased=True):
        return over(x, None, False, correction=int(unbiased))

    name = "std" if root else "var"
    return {name: default, f"{name}.dim": dim, f"{name}.correction": correction}


def _norm(x, ord=2, dim=None, keepdim=False, dtype=None):
    if ord not in (1, 2):
        raise ValueError(f"linalg_vector_norm must be of order 1 or 2, got {ord}.")
    power = jnp.abs if ord == 1 else jnp.square
    total = OPERATORS["sum"](elementwise(power)(x), dim, keepdim, dtype=dtype)
    return total if ord == 1 else elementwise(_root)(total)


def _root(x):
    """Square root whose derivative at 0 is 0, as that of PyTorch's norm."""
    is_zero = x == 0
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, x)))


def _with_place(function: Callable, place: Callable) -> Callable:
    """Operator that gives an extreme and where it is."""

    def apply(x, dim, keepdim=False):
        return function(x, dim, keepdims=keepdim), place(x, dim, keepdims=keepdim)

    return on_plain(apply)


def _argmax(x, dim=None, keepdim=False):
    return jnp.argmax(x, dim, keepdims=keepdim)


OPERATORS = {
    "amax": _typed(jnp.max),
    "amin": _typed(jnp.min),
    "any": _typed(jnp.any),
    "argmax": on_plain(_argmax),
    "linalg_vector_norm": _norm,
    "log_softmax": _softmax(jax.nn.log_softmax),
    "logsumexp": _typed(jax.nn.logsumexp),
    "max": on_plain(jnp.max),
    "max.dim": _with_place(jnp.max, jnp.argmax),
    "mean": _typed(jnp.mean),
    "min": on_plain(jnp.min),
    "min.dim": _with_place(jnp.min, jnp.argmin),
    "softmax": _softmax(jax.nn.softmax),
    "sum": _typed(jnp.sum),
    **_spread(root=False),
    **_spread(root=True),
}
