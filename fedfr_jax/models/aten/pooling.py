"""Pooling and resizing of tensors [B, C, *space]."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from fedfr_jax.convolutions.pooling import max_pooling
from fedfr_jax.models.aten.tensors import (
    channels_last,
    each,
    from_channels_last,
    on_plain,
)


class Windows(NamedTuple):
    """Windows of a pooling over [B, *space, C]."""

    size: list[int]
    stride: list[int]
    pads: list[tuple[int, int]]
    dilation: list[int]

    def all_axes(self) -> dict[str, Any]:
        """Arguments of `lax.reduce_window` over [B, *space, C]."""
        around = lambda values, edge: (edge, *values, edge)
        return {
            "window_dimensions": around(self.size, 1),
            "window_strides": around(self.stride, 1),
            "padding": around(self.pads, (0, 0)),
            "window_dilation": around(self.dilation, 1),
        }

    def reduce(self, x, start, function):
        """Reduce each window of x [B, *space, C]."""
        start = np.asarray(start, x.dtype)
        return lax.reduce_window(x, start, function, **self.all_axes())


def _windows(space, size, stride, padding, dilation, ceil_mode) -> Windows:
    """Windows as PyTorch counts them: with ceil_mode the last may be cut."""
    rank = len(space)
    size, padding, dilation = (each(x, rank) for x in (size, padding, dilation))
    stride = size if stride in (None, []) else each(stride, rank)
    pads = []
    for n, k, s, p, d in zip(space, size, stride, padding, dilation, strict=True):
        reach, after = d * (k - 1) + 1, p
        if ceil_mode:
            count = -(-(n + 2 * p - reach) // s) + 1
            count -= (count - 1) * s >= n + p
            after = max((count - 1) * s + reach - n - p, 0)
        pads.append((p, after))
    return Windows(size, stride, pads, dilation)


def max_pool(x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False):
    """Maximum of each window of x [B, C, *space]."""
    x = channels_last(x)
    space = x.shape[1:-1]
    windows = _windows(space, kernel_size, stride, padding, dilation, ceil_mode)
    y = None
    if max(windows.dilation) > 1:  # reduce_window has no derivative then
        y = max_pooling(x, **windows.all_axes())
    return from_channels_last(windows.reduce(x, -np.inf, lax.max) if y is None else y)


def avg_pool(
    x,
    kernel_size,
    stride=None,
    padding=0,
    ceil_mode=False,
    count_include_pad=True,
    divisor_override=None,
):
    """Mean of each window of x [B, C, *space]."""
    x = channels_last(x)
    space = x.shape[1:-1]
    windows = _windows(space, kernel_size, stride, padding, 1, ceil_mode)
    total = windows.reduce(x, 0, lax.add)
    ones = np.ones((1, *space, 1), np.float32)
    if count_include_pad:  # not what ceil_mode adds
        pads = [(p, p) for p, _ in windows.pads]
        ones = np.pad(ones, [(0, 0), *pads, (0, 0)], constant_values=1)
        rest = [(0, after - p) for p, after in windows.pads]
        windows = windows._replace(pads=rest)
    count = divisor_override or windows.reduce(jnp.asarray(ones), 0, lax.add)
    return from_channels_last((total / count).astype(x.dtype))


def adaptive_avg_pool(x, output_size):
    """Means of x [B, C, *space] over equal parts of each axis, [B, C, *output_size]."""
    x = channels_last(x)
    sizes = each(output_size, x.ndim - 2)
    if all(size == 1 for size in sizes):
        y = jnp.mean(x, tuple(range(1, x.ndim - 1)), keepdims=True)
        return from_channels_last(y)
    for axis, size in enumerate(sizes, 1):
        if size is not None and size != x.shape[axis]:
            x = _weighted(x, _parts(x.shape[axis], size), axis)
    return from_channels_last(x)


def adaptive_max_pool(x, output_size):
    """Maxima over equal parts, whose sizes must divide those of x [B, C, *space]."""
    space = x.shape[2:]
    sizes = each(output_size, len(space))
    if any(n % size for n, size in zip(space, sizes, strict=True)):
        raise ValueError(
            f"adaptive_max_pool2d must have an output_size that divides {space}, got "
            f"{sizes}."
        )
    return max_pool(x, [n // size for n, size in zip(space, sizes, strict=True)])


def _parts(count: int, size: int) -> np.ndarray:
    """Weights [size, count] of means over `size` parts of an axis."""
    weights = np.zeros((size, count), np.float32)
    for i in range(size):
        start, stop = i * count // size, -(-(i + 1) * count // size)
        weights[i, start:stop] = 1 / (stop - start)
    return weights


def _weighted(x, weights: np.ndarray, axis: int):
    """Weighted sums over an axis, weights [new, old]."""
    y = jnp.tensordot(jnp.moveaxis(x, axis, -1), weights.T.astype(x.dtype), 1)
    return jnp.moveaxis(y, -1, axis)


def upsample_nearest(x, output_size=None, scale_factors=None):
    """Enlarge x [B, C, *space]: the value of the nearest pixel before."""
    x = channels_last(x)
    for axis, (size, step) in _targets(x, output_size, scale_factors):
        last = x.shape[axis] - 1
        rows = np.minimum(np.int32(np.floor(np.arange(size) * step)), last)
        x = jnp.take(x, rows, axis)
    return from_channels_last(x)


def upsample_linear(x, output_size, align_corners=False, scale_factors=None):
    """Enlarge x [B, C, *space] by linear interpolation along each axis."""
    x = channels_last(x)
    for axis, (size, step) in _targets(x, output_size, scale_factors):
        count = x.shape[axis]
        if align_corners:
            at = np.arange(size) * ((count - 1) / max(size - 1, 1))
        else:
            at = np.maximum((np.arange(size) + 0.5) * step - 0.5, 0)
        first = np.minimum(np.int32(at), count - 1)
        second = np.minimum(first + 1, count - 1)
        weights = np.zeros((size, count), np.float32)
        rows, share = np.arange(size), at - first
        np.add.at(weights, (rows, first), 1 - share)
        np.add.at(weights, (rows, second), share)
        x = _weighted(x, weights, axis)
    return from_channels_last(x)


def _targets(x, output_size, scale_factors):
    """(axis of x [B, *space, C], (new size, old pixels for each new one))."""
    for i, count in enumerate(x.shape[1:-1]):
        if scale_factors:
            yield i + 1, (int(count * scale_factors[i]), 1 / scale_factors[i])
        else:
            yield i + 1, (output_size[i], count / output_size[i])


def pixel_shuffle(x, upscale_factor):
    """[B, C r r, H, W] -> [B, C, H r, W r]."""
    *start, channels, height, width = x.shape
    r = upscale_factor
    x = x.reshape(*start, channels // (r * r), r, r, height, width)
    x = jnp.moveaxis(x, (-4, -3), (-3, -1))  # [..., H, r, W, r]
    return x.reshape(*start, channels // (r * r), height * r, width * r)


OPERATORS = {
    "adaptive_avg_pool1d": adaptive_avg_pool,
    "adaptive_avg_pool2d": adaptive_avg_pool,
    "adaptive_max_pool2d": lambda x, output_size: (adaptive_max_pool(x, output_size),),
    "avg_pool2d": avg_pool,
    "max_pool2d": max_pool,
    "pixel_shuffle": on_plain(pixel_shuffle),
    "upsample_bilinear2d": upsample_linear,
    "upsample_nearest2d": upsample_nearest,
}
