"""Pooling as operations on slices: windows of any size, stride, padding and dilation.

In a loop XLA:CPU computes reduce_window, and above all its derivative, ten times slower
than operations on slices; on a GPU the derivative of a maximum over overlapping windows
adds up in no fixed order. Windows side by side are an axis of their own, over which a
CPU reduces: what follows a reduction does not compute it again for each of its reads.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

MAX_WINDOW = 64  # elements along an axis, each a slice to compile


def _larger(a, b):
    """The larger one, the first of equals, NaN of NaN; all derivatives are 0 or 1.

    That of jnp.maximum gives half to each of equals.
    """
    return jnp.where((a >= b) | (a != a), a, b)


def _smaller(a, b):
    return jnp.where((a <= b) | (a != a), a, b)


def _lowest(dtype):
    """The least number of a dtype."""
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _highest(dtype):
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def _nothing(dtype):
    """What a sum is not changed by."""
    return jnp.zeros((), dtype)


def _pool(
    x: jax.Array,
    combine: Callable,
    start: Callable,
    reduce: Callable | None,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    base_dilation: Sequence[int] = (),
    window_dilation: Sequence[int] = (),
) -> jax.Array | None:
    """Combine the windows of x, as `lax.reduce_window` with its arguments.

    None, which leaves it to XLA, for windows that are too long to compile and for truth
    values.

    The last axis comes first, so that of equals the first in the order of memory is
    taken, as XLA's derivative does.

    Args:
      start: dtype -> what `combine` does not change a number by.
      reduce: (x, axes) -> x reduced over axes, for windows side by side.
    """
    if x.dtype == bool or max(window_dimensions) > MAX_WINDOW:
        return None
    inner = [d - 1 for d in base_dilation or (1,) * x.ndim]
    pads = [(*pair, between) for pair, between in zip(padding, inner, strict=True)]
    if any(map(any, pads)):
        x = lax.pad(x, jnp.asarray(start(x.dtype), x.dtype), pads)
    spread = window_dilation or (1,) * x.ndim
    side_by_side = tuple(window_dimensions) == tuple(window_strides)
    if reduce and side_by_side and {*spread} == {1}:
        return reduce(*_blocks(x, window_dimensions))
    axes = enumerate(zip(window_dimensions, window_strides, spread, strict=True))
    for axis, (size, step, dilation) in reversed([*axes]):
        if size > 1 or step > 1:
            x = functools.reduce(combine, windows_of(x, axis, size, step, dilation))
    return x


def _blocks(x, sizes):
    """x with an axis of its own for each window's side, and these axes."""
    counts = [n // size for n, size in zip(x.shape, sizes, strict=True)]
    x = x[tuple(slice(n * size) for n, size in zip(counts, sizes, strict=True))]
    shape, axes = [], []
    for count, size in zip(counts, sizes, strict=True):
        shape.append(count)
        if size > 1:
            axes.append(len(shape))
            shape.append(size)
    return x.reshape(shape), tuple(axes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _extreme(x, axes, reduce):
    """Maximum or minimum over axes; its derivative is that of the first of equals."""
    return reduce(x, axes)


@_extreme.defjvp
def _extreme_tangent(axes, reduce, primals, tangents):
    [x], [dx] = primals, tangents
    y = _extreme(x, axes, reduce)
    order = jnp.arange(math.prod(x.shape[axis] for axis in axes))
    sides = [n if axis in axes else 1 for axis, n in enumerate(x.shape)]
    order = order.reshape(sides)
    is_chosen = (x == jnp.expand_dims(y, axes)) | (x != x)
    first = jnp.where(is_chosen, order, order.size).min(axes, keepdims=True)
    return y, jnp.where(order == first, dx, 0).sum(axes)


def windows_of(
    x: jax.Array, axis: int, size: int, step: int, dilation: int = 1
) -> list[jax.Array]:
    """The i-th elements of all windows along an axis, for every i of `size`."""
    count = (x.shape[axis] - (size - 1) * dilation - 1) // step + 1
    last = (count - 1) * step + 1
    starts = range(0, size * dilation, dilation)
    return [lax.slice_in_dim(x, i, i + last, step, axis) for i in starts]


def max_pooling(
    x: jax.Array, *, larger: Callable = _larger, by_blocks: bool = False, **window
) -> jax.Array | None:
    """`lax.reduce_window_max` with its parameters, by the larger one of two arrays.

    Args:
      by_blocks: whether windows side by side are reduced, not combined.
    """
    return _pool(x, larger, _lowest, _maximum if by_blocks else None, **window)


def min_pooling(x: jax.Array, *, by_blocks: bool = False, **window) -> jax.Array | None:
    """`lax.reduce_window_min` with its parameters; by_blocks as of `max_pooling`."""
    return _pool(x, _smaller, _highest, _minimum if by_blocks else None, **window)


def _maximum(x, axes):
    return _extreme(x, axes, jnp.max)


def _minimum(x, axes):
    return _extreme(x, axes, jnp.min)


def sum_pooling(x: jax.Array, **window) -> jax.Array | None:
    """`lax.reduce_window_sum` with its parameters."""
    return _pool(x, jnp.add, _nothing, jnp.sum, **window)


def _is_long(window):
    return max(window["window_dimensions"]) > MAX_WINDOW


def _chosen(select):
    """Pooling of the comparison `ge` or `le` of a derivative."""
    return max_pooling if select.name == "ge" else min_pooling


def pooling_transposed(
    dy: jax.Array, x: jax.Array, *, select_prim: Primitive, **window
) -> jax.Array | None:
    """Derivative of pooling: dy at the elements that windows of x have chosen."""
    pool = lambda x: _chosen(select_prim)(x, **window)
    return None if _is_long(window) else jax.vjp(pool, x)[1](dy)[0]


def pooling_tangent(
    dx: jax.Array, x: jax.Array, *, select_prim: Primitive, **window
) -> jax.Array | None:
    """Tangent of pooling: dx of the elements that windows of x have chosen."""
    pool = lambda x: _chosen(select_prim)(x, **window)
    return None if _is_long(window) else jax.jvp(pool, (x,), (dx,))[1]
