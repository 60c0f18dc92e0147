"""Tensors whose axes may lie in another order, and operators on them.

A tensor of images is [B, C, H, W] to an operator, and lies in memory as [B, H, W, C],
which is fast on all platforms: `Ordered` is an array whose axes lie in another order.
Convolutions, pooling and normalization give such tensors, elementwise operators, sums
and concatenation keep the order, a permutation only renames axes; the others ask for
the tensor as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np


class Ordered(NamedTuple):
    """A tensor whose axes lie in memory in another order."""

    array: jax.Array
    order: tuple[int, ...]  # the tensor's axis at each axis of the array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(self.array.shape[self.order.index(i)] for i in range(self.ndim))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.array.ndim

    @property
    def dtype(self):
        """Dtype of the array."""
        return self.array.dtype


Tensor = Any  # an array or an `Ordered`


def ordered(array: jax.Array, order: Sequence[int]) -> Tensor:
    """The tensor whose axes lie in `order`."""
    order = tuple(order)
    return array if order == tuple(range(array.ndim)) else Ordered(array, order)


def order_of(x: Tensor) -> tuple[int, ...]:
    """Order of a tensor's axes."""
    return x.order if isinstance(x, Ordered) else tuple(range(x.ndim))


def in_order(x: Tensor, order: Sequence[int]) -> jax.Array:
    """Array of a tensor with its axes in `order`."""
    if order_of(x) == tuple(order):
        return array_of(x)
    return array_of(x).transpose([order_of(x).index(axis) for axis in order])


def array_of(x: Tensor) -> jax.Array:
    """Array of a tensor, in its order."""
    return x.array if isinstance(x, Ordered) else x


def plain(x: Any) -> Any:
    """A tensor as an array of its own shape; also those of lists."""
    if isinstance(x, Ordered):
        return in_order(x, range(x.ndim))
    return [plain(one) for one in x] if isinstance(x, list) else x


def is_tensor(x: Any) -> bool:
    """Whether it is a tensor, no number."""
    return isinstance(x, Ordered | jax.Array | np.ndarray)


def channels_last(x: Tensor) -> jax.Array:
    """[B, *space, C] of a tensor [B, C, *space]."""
    return in_order(x, (0, *range(2, x.ndim), 1))


def from_channels_last(array: jax.Array) -> Tensor:
    """The tensor [B, C, *space] of an array [B, *space, C]."""
    return ordered(array, (0, *range(2, array.ndim), 1))


KERNEL = (2, 3, 1, 0)  # order of parameters with four axes: [H, W, I, O]


def elementwise(function: Callable) -> Callable:
    """Operator of arrays that broadcast, in the order of the first large tensor."""

    def apply(*args, **kwargs):
        tensors = [x for x in args if is_tensor(x)]
        ndim = max((x.ndim for x in tensors), default=0)
        orders = [order_of(x) for x in tensors if x.ndim == ndim]
        moved = [x for x in orders if x != tuple(range(ndim))]
        order = (moved or orders or [()])[0]

        def aligned(x):
            if not is_tensor(x) or x.ndim == 0:
                return x
            if x.ndim < ndim:
                x = plain(x)
                x = x.reshape((1,) * (ndim - x.ndim) + x.shape)
            return in_order(x, order)

        y = function(*map(aligned, args), **kwargs)
        return ordered(y, order) if is_tensor(y) and y.ndim else y

    return apply


def on_plain(function: Callable) -> Callable:
    """Operator of arrays of the tensors' own shapes."""

    def apply(*args, **kwargs):
        return function(*map(plain, args), **{k: plain(x) for k, x in kwargs.items()})

    return apply


def over_axes(function: Callable) -> Callable:
    """Reduction (array, axes, keepdims) -> array over some axes of a tensor."""

    def apply(x, dim=None, keepdim=False, **options):
        axes = axes_of(x, dim)
        order = order_of(x)
        places = tuple(order.index(axis) for axis in axes)
        y = function(array_of(x), places, True, **options)
        if keepdim:
            return ordered(y, order)
        left = [axis for axis in order if axis not in axes]
        y = y.reshape([x.shape[axis] for axis in left])
        return ordered(y, [sorted(left).index(axis) for axis in left])

    return apply


def axes_of(x: Tensor, dim: Any) -> list[int]:
    """Axes that an argument `dim` means: a number, several, or all."""
    if dim is None or dim == [] or dim == ():
        return [*range(x.ndim)]
    dims = dim if isinstance(dim, list | tuple) else [dim]
    return [axis % x.ndim for axis in dims]


def on_axis(function: Callable) -> Callable:
    """Operator (array, axis, ...) -> array or arrays that keeps all axes."""

    def apply(x, dim=0, *args, **kwargs):
        order = order_of(x)
        y = function(array_of(x), order.index(dim % x.ndim), *args, **kwargs)
        back = lambda one: ordered(one, order)
        return [back(one) for one in y] if isinstance(y, list) else back(y)

    return apply


def each(value: Any, count: int) -> list[int]:
    """A number for each of the axes, where one number may stand for all."""
    values = [*value] if isinstance(value, list | tuple) else [value]
    return values * count if len(values) == 1 else values
