"""Shapes of tensors: views, parts, joins, padding, and tensors made anew."""

import functools
import operator
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from fedfr_jax.models.aten.tensors import (
    Tensor,
    array_of,
    axes_of,
    in_order,
    on_axis,
    on_plain,
    order_of,
    ordered,
)


def permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Only the order is another one."""
    dims = [axis % x.ndim for axis in dims]
    return ordered(array_of(x), [dims.index(axis) for axis in order_of(x)])


def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """Exchange two axes."""
    dims = [*range(x.ndim)]
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return permute(x, dims)


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate along an axis, in the order of the first."""
    order = order_of(tensors[0])
    dtype = functools.reduce(jnp.promote_types, [x.dtype for x in tensors])
    arrays = [in_order(x, order).astype(dtype) for x in tensors]
    return ordered(jnp.concatenate(arrays, order.index(dim % len(order))), order)


def _slice(x, axis, start=None, end=None, step=1):
    start, stop, step = slice(start, end, step).indices(x.shape[axis])
    return lax.slice_in_dim(x, start, max(start, stop), step, axis)


def _split(x, axis, size):
    if isinstance(size, int):
        count = x.shape[axis]
        sizes = [min(size, count - start) for start in range(0, count, size)]
    else:
        sizes = [*size]
    ends = np.cumsum(sizes)
    pairs = zip(ends - sizes, ends, strict=True)
    return [lax.slice_in_dim(x, int(a), int(b), 1, axis) for a, b in pairs]


MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def pad(x, pad, mode="constant", value=None):
    """Pad the last axes, (before, after) from the last one on."""
    pads = [(0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        pads[x.ndim - 1 - i] = (pad[2 * i], pad[2 * i + 1])
    pads = [pads[axis] for axis in order_of(x)]
    array = array_of(x)
    if mode == "constant":
        number = np.asarray(0 if value is None else value, x.dtype)
        return ordered(lax.pad(array, number, [(*p, 0) for p in pads]), order_of(x))
    return ordered(jnp.pad(array, pads, mode=MODES[mode]), order_of(x))


def expand(x, size, *, implicit=False):
    """Broadcast; -1 keeps an axis."""
    del implicit
    start = len(size) - x.ndim
    shape = [x.shape[i - start] if n == -1 else n for i, n in enumerate(size)]
    return jnp.broadcast_to(x, shape)


def _squeeze(x, dim=None):
    axes = [axis for axis in axes_of(x, dim) if x.shape[axis] == 1]
    return jnp.squeeze(x, axes)


def _index(x, indices):
    return x[tuple(slice(None) if i is None else i for i in indices)]


def _select_scatter(x, src, dim, index):
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(src)


def _slice_scatter(x, src, dim=0, start=None, end=None, step=1):
    return x.at[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)].set(src)


def _roll(x, shifts, dims=()):
    return jnp.roll(x, shifts, dims) if dims else jnp.roll(x, shifts[0])


def _unbind(x, dim=0):
    return [jnp.squeeze(one, dim) for one in _split(x, dim % x.ndim, 1)]


def _new(value):
    """Operator (size) -> a tensor full of a number."""
    return lambda size, *, dtype=None, **_: jnp.full(size, value, dtype or jnp.float32)


def _like(value):
    """Operator (x, size) -> a tensor of x's dtype, and shape without a size."""

    def apply(x, size=None, *, dtype=None, **_):
        return jnp.full(x.shape if size is None else size, value, dtype or x.dtype)

    return apply


def _full(size, fill_value, *, dtype=None, **_):
    return jnp.full(size, fill_value, dtype)


def _arange(*bounds, dtype=None, **_):
    return jnp.arange(*bounds, dtype=dtype)


def _same(x, **_):
    return x


def _view(x, size):
    return x.reshape(size)


SPLIT = on_axis(_split)
PLAIN = {
    "_unsafe_view": _view,
    "cumsum": lambda x, dim, **_: jnp.cumsum(x, dim),
    "embedding": lambda weight, indices, *_: jnp.take(weight, indices, axis=0),
    "expand": expand,
    "flip": jnp.flip,
    "gather": lambda x, dim, index, **_: jnp.take_along_axis(x, index, dim),
    "index": _index,
    "index_select": lambda x, dim, index: jnp.take(x, index, dim),
    "repeat": jnp.tile,
    "roll": _roll,
    "select": lambda x, dim, index: jnp.take(x, index, dim),
    "select_scatter": _select_scatter,
    "slice_scatter": _slice_scatter,
    "squeeze": _squeeze,
    "stack": lambda tensors, dim=0: jnp.stack(tensors, dim),
    "unbind": _unbind,
    "unsqueeze": jnp.expand_dims,
    "view": _view,
}
NEW = {
    "arange": _arange,
    "empty": _new(0),
    "empty_like": _like(0),
    "full": _full,
    "new_empty": _like(0),
    "new_ones": _like(1),
    "new_zeros": _like(0),
    "ones": _new(1),
    "ones_like": _like(1),
    "zeros": _new(0),
    "zeros_like": _like(0),
}
OPERATORS = {
    **{name: on_plain(function) for name, function in PLAIN.items()},
    **NEW,
    "alias": _same,
    "cat": cat,
    "lift_fresh_copy": _same,
    "pad": pad,
    "permute": permute,
    "slice": on_axis(_slice),
    "split": lambda x, size, dim=0: SPLIT(x, dim, size),
    "split_with_sizes": lambda x, sizes, dim=0: SPLIT(x, dim, sizes),
    "sym_size": lambda x, dim: x.shape[dim],
    "transpose": transpose,
}


def _of_numbers(function: Callable) -> Callable:
    """Function of numbers that sizes can be: a stranger's graph may have any."""

    def apply(*numbers):
        if not all(isinstance(x, int | float) and abs(x) < 2**40 for x in numbers):
            raise TypeError("numbers below 2 to the 40th are known here")
        if function is operator.pow and abs(numbers[1]) > 40:
            raise TypeError("powers up to 40 are known here")
        return function(*numbers)

    return apply


# On numbers such as the batch's size
OF_PYTHON = "add eq floordiv ge gt le lt mod mul ne neg pow sub truediv"
NUMBERS = {name: _of_numbers(vars(operator)[name]) for name in OF_PYTHON.split()}
NUMBERS["getitem"] = operator.getitem
NUMBERS |= {
    "sym_float": float,
    "sym_max": max,
    "sym_min": min,
    "sym_not": operator.not_,
}
