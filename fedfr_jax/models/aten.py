"""PyTorch's operators, ATen, as functions of JAX arrays: those of vision networks.

A tensor of images is [B, C, H, W] to an operator, and lies in memory as [B, H, W, C],
which is fast on all platforms: `Ordered` is an array whose axes lie in another order.
Convolutions, pooling and normalization give such tensors, elementwise operators, sums
and concatenation keep the order, a permutation only renames axes; the others ask for
the tensor as it is. Names and arguments: native_functions.yaml of PyTorch 2.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedfr_jax.models.norm import normalize_batch, per_channel, sum_dtype, unbiased


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
        axes = _axes(x, dim)
        order = order_of(x)
        places = tuple(order.index(axis) for axis in axes)
        y = function(array_of(x), places, True, **options)
        if keepdim:
            return ordered(y, order)
        left = [axis for axis in order if axis not in axes]
        y = y.reshape([x.shape[axis] for axis in left])
        return ordered(y, [sorted(left).index(axis) for axis in left])

    return apply


def _axes(x, dim) -> list[int]:
    if dim is None or dim == [] or dim == ():
        return [*range(x.ndim)]
    dims = dim if isinstance(dim, list | tuple) else [dim]
    return [axis % x.ndim for axis in dims]


def on_axis(function: Callable) -> Callable:
    """Operator (array, axis, ...) -> array or arrays that keeps all axes."""

    def apply(x, *args, dim=0, **kwargs):
        order = order_of(x)
        y = function(array_of(x), order.index(dim % x.ndim), *args, **kwargs)
        back = lambda one: ordered(one, order)
        return [back(one) for one in y] if isinstance(y, list) else back(y)

    return apply


# Convolutions and pooling


def _each(value, count: int) -> list[int]:
    """A number for each of the axes."""
    values = [*value] if isinstance(value, list | tuple) else [value]
    return values * count if len(values) == 1 else values


def conv(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Convolution of x [B, I, *space] with weight [O, I / groups, *window]."""
    rank = x.ndim - 2
    stride, dilation = _each(stride, rank), _each(dilation, rank)
    reach = [d * (n - 1) for d, n in zip(dilation, weight.shape[2:], strict=True)]
    if padding == "same":
        pads = [(total // 2, total - total // 2) for total in reach]
    else:
        padding = 0 if padding == "valid" else padding
        pads = [(p, p) for p in _each(padding, rank)]
    kernel = in_order(weight, (*range(2, rank + 2), 1, 0))
    y = _convolve(channels_last(x), kernel, stride, pads, dilation, groups)
    return from_channels_last(_add_bias(y, bias))


def _convolve(x, kernel, stride, pads, dilation, groups, inner=None):
    space = "DHW"[3 - len(stride) :]
    return lax.conv_general_dilated(
        x,
        kernel,
        stride,
        pads,
        lhs_dilation=inner,
        rhs_dilation=dilation,
        dimension_numbers=(f"N{space}C", f"{space}IO", f"N{space}C"),
        feature_group_count=groups,
    )


def _add_bias(y, bias):
    return y if bias is None else y + per_channel(bias, y)


def conv_transpose(
    x, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
):
    """Transposed convolution of x [B, I, *space], weight [I, O / groups, *window]."""
    rank = x.ndim - 2
    stride, dilation = _each(stride, rank), _each(dilation, rank)
    window = range(2, rank + 2)
    kernel = in_order(weight, (*window, 0, 1))  # [*window, I, O / groups]
    kernel = jnp.flip(kernel, range(rank))
    *sizes, inputs, outputs = kernel.shape
    kernel = kernel.reshape(*sizes, groups, inputs // groups, outputs)
    kernel = jnp.moveaxis(kernel, rank, -2)
    kernel = kernel.reshape(*sizes, inputs // groups, groups * outputs)
    pads = []
    each = zip(
        sizes, dilation, _each(padding, rank), _each(output_padding, rank), strict=True
    )
    for size, step, pad, more in each:
        around = step * (size - 1) - pad
        pads.append((around, around + more))
    ones = [1] * rank
    y = _convolve(channels_last(x), kernel, ones, pads, dilation, groups, stride)
    return from_channels_last(_add_bias(y, bias))


class Windows(NamedTuple):
    """Windows of a pooling over [B, *space, C]."""

    size: list[int]
    stride: list[int]
    pads: list[tuple[int, int]]
    dilation: list[int]

    def reduce(self, x, start, function):
        """Reduce each window of x [B, *space, C]."""
        around = lambda values, edge: (edge, *values, edge)
        return lax.reduce_window(
            x,
            np.asarray(start, x.dtype),
            function,
            around(self.size, 1),
            around(self.stride, 1),
            around(self.pads, (0, 0)),
            window_dilation=around(self.dilation, 1),
        )


def _windows(space, size, stride, padding, dilation, ceil_mode) -> Windows:
    """Windows as PyTorch counts them: with ceil_mode the last may be cut."""
    rank = len(space)
    size, padding, dilation = (_each(x, rank) for x in (size, padding, dilation))
    stride = size if stride in (None, []) else _each(stride, rank)
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
    return from_channels_last(windows.reduce(x, -np.inf, lax.max))


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
    sizes = _each(output_size, x.ndim - 2)
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
    sizes = _each(output_size, len(space))
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


# Normalization


def batch_norm(x, weight, bias, mean, var, momentum, eps, *, training):
    """(y, mean, 1 / deviation, new running mean, new running variance).

    `mean` and `var` are the running ones [C], None where there are none.
    """
    z = channels_last(x)
    channels = z.shape[-1:]
    wide = z.astype(sum_dtype(z.dtype))
    scale = jnp.ones(channels) if weight is None else plain(weight)
    shift = jnp.zeros(channels) if bias is None else plain(bias)
    scale, shift = scale.astype(wide.dtype), shift.astype(wide.dtype)
    if training:
        y, batch_mean, batch_var = normalize_batch(wide, scale, shift, eps)
        if mean is not None:
            mean = _moved(mean, batch_mean, momentum)
            var = _moved(var, unbiased(batch_var, wide), momentum)
    else:
        unit = wide - per_channel(mean.astype(wide.dtype), wide)
        unit *= per_channel(lax.rsqrt(var.astype(wide.dtype) + eps), wide)
        y = unit * per_channel(scale, wide) + per_channel(shift, wide)
    return from_channels_last(y.astype(z.dtype)), None, None, mean, var


def _moved(old, new, momentum):
    return (1 - momentum) * old + momentum * lax.stop_gradient(new).astype(old.dtype)


def trained_batch_norm(x, weight, bias, mean, var, training, momentum, eps):
    """`batch_norm` of _native_batch_norm_legit_functional."""
    return batch_norm(x, weight, bias, mean, var, momentum, eps, training=training)


def batch_norm_without_statistics(x, weight, bias, training, momentum, eps):
    """`batch_norm` of a layer that keeps no running statistics."""
    return batch_norm(x, weight, bias, None, None, momentum, eps, training=training)


def group_norm(x, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    """Normalize groups of channels of each image of x [B, C, *space]."""
    del cudnn_enabled
    z = channels_last(x)
    wide = z.astype(sum_dtype(z.dtype))
    wide = wide.reshape(len(z), -1, num_groups, z.shape[-1] // num_groups)
    y = _standardized(wide, (1, 3), eps).reshape(z.shape)
    return from_channels_last(_scaled(y, weight, bias).astype(z.dtype))


def instance_norm(x, weight, bias, mean, var, use_input_stats, momentum, eps, cudnn):
    """Normalize each channel of each image of x [B, C, *space]."""
    del momentum, cudnn
    if not use_input_stats or mean is not None or var is not None:
        raise ValueError("instance_norm must have track_running_stats=False, got True.")
    return group_norm(x, x.shape[1], weight, bias, eps)


def layer_norm(
    x, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True
):
    """Normalize the last axes of x, as many as `normalized_shape` has."""
    del cudnn_enable
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    y = _standardized(x.astype(sum_dtype(x.dtype)), axes, eps)
    if weight is not None:
        y = y * weight
    return (y if bias is None else y + bias).astype(x.dtype)


def rms_norm(x, normalized_shape, weight=None, eps=None):
    """Divide the last axes of x by their root mean square."""
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    wide = x.astype(sum_dtype(x.dtype))
    eps = jnp.finfo(x.dtype).eps if eps is None else eps
    y = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axes, keepdims=True) + eps)
    return (y if weight is None else y * weight).astype(x.dtype)


def _standardized(x, axes, eps):
    centered = x - jnp.mean(x, axes, keepdims=True)
    return centered * lax.rsqrt(
        jnp.mean(jnp.square(centered), axes, keepdims=True) + eps
    )


def _scaled(y, weight, bias):
    if weight is not None:
        y = y * per_channel(plain(weight), y)
    return _add_bias(y, None if bias is None else plain(bias))


# Elementwise


def _add(x, y, *, alpha=1):
    return x + (y if alpha == 1 else alpha * y)


def _sub(x, y, *, alpha=1):
    return x - (y if alpha == 1 else alpha * y)


def _div(x, y, *, rounding_mode=None):
    if rounding_mode is None:
        return jnp.true_divide(x, y)
    return {"floor": jnp.floor, "trunc": jnp.trunc}[rounding_mode](x / y)


def _clamp(x, min=None, max=None):
    # A bound that x meets passes the derivative on, as in PyTorch.
    x = x if min is None else jnp.where(x < min, min, x)
    return x if max is None else jnp.where(x > max, max, x)


def _hardtanh(x, min_val=-1.0, max_val=1.0):
    y = jnp.where(x > min_val, x, min_val)
    return jnp.where(y < max_val, y, max_val)


def _gelu(x, *, approximate="none"):
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def _elu(x, alpha=1, scale=1, input_scale=1):
    below = alpha * jnp.expm1(input_scale * jnp.where(x > 0, 0, x))
    return scale * jnp.where(x > 0, x, below)


def _softplus(x, beta=1, threshold=20):
    return jnp.where(beta * x > threshold, x, jnp.logaddexp(beta * x, 0.0) / beta)


def _leaky_relu(x, negative_slope=0.01):
    return jnp.where(x > 0, x, negative_slope * x)


def prelu(x, weight):
    """x where positive, else weight [C] or [1] times x [B, C, ...]."""
    slope = plain(weight)
    if x.ndim > 1:
        slope = slope.reshape(1, -1, *[1] * (x.ndim - 2))
    return elementwise(lambda x, slope: jnp.where(x > 0, x, slope * x))(x, slope)


ELEMENTWISE = {
    "abs": jnp.abs,
    "add": _add,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_not": jnp.bitwise_not,
    "bitwise_or": jnp.bitwise_or,
    "ceil": jnp.ceil,
    "clamp": _clamp,
    "clamp_max": lambda x, max: _clamp(x, None, max),
    "clamp_min": _clamp,
    "clone": lambda x, **_: x,
    "cos": jnp.cos,
    "detach": lax.stop_gradient,
    "div": _div,
    "elu": _elu,
    "eq": jnp.equal,
    "erf": jax.scipy.special.erf,
    "exp": jnp.exp,
    "expm1": jnp.expm1,
    "fill": lambda x, value: jnp.broadcast_to(value, x.shape).astype(x.dtype),
    "floor": jnp.floor,
    "ge": jnp.greater_equal,
    "gelu": _gelu,
    "gt": jnp.greater,
    "hardsigmoid": lambda x: _hardtanh(x + 3, 0, 6) / 6,
    "hardswish": lambda x: x * _hardtanh(x + 3, 0, 6) / 6,
    "hardtanh": _hardtanh,
    "le": jnp.less_equal,
    "leaky_relu": _leaky_relu,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "log_sigmoid": jax.nn.log_sigmoid,
    "logical_and": jnp.logical_and,
    "logical_not": jnp.logical_not,
    "logical_or": jnp.logical_or,
    "lt": jnp.less,
    "masked_fill": lambda x, mask, value: jnp.where(mask, value, x),
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "mish": lambda x: x * jnp.tanh(_softplus(x)),
    "mul": jnp.multiply,
    "ne": jnp.not_equal,
    "neg": jnp.negative,
    "pow": jnp.power,
    "reciprocal": jnp.reciprocal,
    "relu": jax.nn.relu,
    "relu6": lambda x: _hardtanh(x, 0, 6),
    "round": jnp.round,
    "rsqrt": lax.rsqrt,
    "rsub": lambda x, y, *, alpha=1: _sub(y, x, alpha=alpha),
    "selu": jax.nn.selu,
    "sigmoid": jax.nn.sigmoid,
    "sign": jnp.sign,
    "silu": jax.nn.silu,
    "sin": jnp.sin,
    "softplus": _softplus,
    "sqrt": jnp.sqrt,
    "square": jnp.square,
    "sub": _sub,
    "tanh": jnp.tanh,
    "where": jnp.where,
    "zeros_like": lambda x, **_: jnp.zeros_like(x),
    "ones_like": lambda x, **_: jnp.ones_like(x),
}


# Sums and products


def _var(x, axes, keepdims, *, unbiased=True, correction=None):
    correction = int(unbiased) if correction is None else int(correction)
    return jnp.var(x, axes, ddof=correction, keepdims=keepdims)


def _std(x, axes, keepdims, **options):
    return jnp.sqrt(_var(x, axes, keepdims, **options))


def _typed(function):
    """A sum with the argument `dtype`."""
    return lambda x, axes, keepdims, dtype=None: function(
        x if dtype is None else x.astype(dtype), axis=axes, keepdims=keepdims
    )


def _norm(x, ord=2, dim=None, keepdim=False, dtype=None):
    if ord not in (1, 2):
        raise ValueError(f"linalg_vector_norm must be of order 1 or 2, got {ord}.")
    power = jnp.abs if ord == 1 else jnp.square
    total = REDUCTIONS["sum"](elementwise(power)(x), dim, keepdim, dtype=dtype)
    return total if ord == 1 else elementwise(jnp.sqrt)(total)


def _softmax(x, axis, dtype=None):
    return jax.nn.softmax(x if dtype is None else x.astype(dtype), axis)


def _log_softmax(x, axis, dtype=None):
    return jax.nn.log_softmax(x if dtype is None else x.astype(dtype), axis)


REDUCTIONS = {
    name: over_axes(function)
    for name, function in {
        "amax": lambda x, axes, keepdims: jnp.max(x, axes, keepdims=keepdims),
        "amin": lambda x, axes, keepdims: jnp.min(x, axes, keepdims=keepdims),
        "any": lambda x, axes, keepdims: jnp.any(x, axes, keepdims=keepdims),
        "logsumexp": lambda x, axes, keepdims: jax.nn.logsumexp(
            x, axes, keepdims=keepdims
        ),
        "mean": _typed(jnp.mean),
        "std": _std,
        "std.correction": _std,
        "sum": _typed(jnp.sum),
        "var": _var,
        "var.correction": _var,
    }.items()
}


def linear(x, weight, bias=None):
    """x [..., I], weight [O, I] -> [..., O]."""
    y = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return _add_bias(y, bias)


def attention(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    *,
    scale=None,
    enable_gqa=False,
    draw=None,
):
    """Softmax attention of [..., L, E] over [..., S, E]."""
    if enable_gqa:
        raise ValueError("attention must have enable_gqa=False, got True.")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.matmul(query * scale, jnp.swapaxes(key, -1, -2))
    if is_causal:
        attn_mask = np.tril(np.ones(scores.shape[-2:], bool))
    if attn_mask is not None and attn_mask.dtype == bool:
        scores = jnp.where(attn_mask, scores, -jnp.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = jax.nn.softmax(scores.astype(sum_dtype(scores.dtype)), -1)
    weights = weights.astype(value.dtype)
    if dropout_p:
        weights = dropout(weights, dropout_p, True, draw=draw)
    return jnp.matmul(weights, value)


# Random numbers: `draw()` is a key of this place in the network


def dropout(x, p, train=True, *, draw):
    """Zero a share p of the numbers, and scale the others."""
    if not train or p == 0:
        return x
    keep = jax.random.bernoulli(draw(), 1 - p, array_of(x).shape)
    if p == 1:
        return elementwise(jnp.zeros_like)(x)
    y = jnp.where(keep, array_of(x) / (1 - p), 0)
    return ordered(y, order_of(x))


def feature_dropout(x, p, train=True, *, draw):
    """Zero a share p of the channels of x [B, C, ...], and scale the others."""
    if not train or p == 0:
        return x
    keep = jax.random.bernoulli(draw(), 1 - p, (*x.shape[:2], *[1] * (x.ndim - 2)))
    return elementwise(lambda x, keep: jnp.where(keep, x / (1 - p), 0))(x, keep)


def _bernoulli(x, p=None, *, draw):
    x = plain(x)
    return jax.random.bernoulli(draw(), x if p is None else p, x.shape).astype(x.dtype)


def _like(sample):
    return lambda x, *, draw, **_: sample(draw(), x.shape, x.dtype)


def _of_size(sample):
    return lambda size, *, draw, **_: sample(draw(), tuple(size))


RANDOM = {
    "bernoulli": _bernoulli,
    "dropout": dropout,
    "feature_dropout": feature_dropout,
    "native_dropout": lambda x, p, train, *, draw: (dropout(x, p, train, draw=draw),),
    "rand": _of_size(jax.random.uniform),
    "rand_like": _like(jax.random.uniform),
    "randn": _of_size(jax.random.normal),
    "randn_like": _like(jax.random.normal),
    "scaled_dot_product_attention": on_plain(attention),
}


# Shapes


def permute(x, dims):
    """Only the order is another one."""
    dims = [axis % x.ndim for axis in dims]
    return ordered(array_of(x), [dims.index(axis) for axis in order_of(x)])


def transpose(x, dim0, dim1):
    """Exchange two axes."""
    dims = [*range(x.ndim)]
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return permute(x, dims)


def cat(tensors, dim=0):
    """Concatenate along an axis, in the order of the first."""
    order = order_of(tensors[0])
    dtype = functools.reduce(jnp.promote_types, [x.dtype for x in tensors])
    arrays = [in_order(x, order).astype(dtype) for x in tensors]
    return ordered(jnp.concatenate(arrays, order.index(dim % len(order))), order)


def _slice(x, axis, start=None, end=None, step=1):
    start, stop, step = slice(start, end, step).indices(x.shape[axis])
    return lax.slice_in_dim(x, start, max(start, stop), step, axis)


def _narrow(x, axis, start, length):
    return _slice(x, axis, start, start + length)


def _split(x, axis, size):
    if isinstance(size, int):
        count = x.shape[axis]
        sizes = [min(size, count - start) for start in range(0, count, size)]
    else:
        sizes = [*size]
    ends = np.cumsum(sizes)
    pairs = zip(ends - sizes, ends, strict=True)
    return [lax.slice_in_dim(x, int(a), int(b), 1, axis) for a, b in pairs]


def _chunk(x, axis, chunks):
    return _split(x, axis, -(-x.shape[axis] // chunks))


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
    axes = [axis for axis in _axes(x, dim) if x.shape[axis] == 1]
    return jnp.squeeze(x, axes)


def _flatten(x, start_dim=0, end_dim=-1):
    first, last = start_dim % x.ndim, end_dim % x.ndim
    return x.reshape(*x.shape[:first], -1, *x.shape[last + 1 :])


def _unflatten(x, dim, sizes):
    dim %= x.ndim
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def _index(x, indices):
    return x[tuple(slice(None) if i is None else i for i in indices)]


def _select_scatter(x, src, dim, index):
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(src)


def _slice_scatter(x, src, dim=0, start=None, end=None, step=1):
    return x.at[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)].set(src)


def _to(x, *, dtype=None, **_):
    return x if dtype is None else x.astype(dtype)


def _filled(value):
    return lambda size, *, dtype=None, **_: jnp.full(size, value, dtype or jnp.float32)


def _full(size, fill_value, *, dtype=None, **_):
    return jnp.full(size, fill_value, dtype)


def _arange(*bounds, dtype=None, **_):
    return jnp.arange(*bounds, dtype=dtype)


def _max(function, arg):
    def apply(x, dim, keepdim=False):
        return function(x, dim, keepdims=keepdim), arg(x, dim, keepdims=keepdim)

    return on_plain(apply)


def _roll(x, shifts, dims=()):
    return jnp.roll(x, shifts, dims) if dims else jnp.roll(x, shifts[0])


PLAIN = {
    "_to_copy": _to,
    "addmm": lambda c, a, b, *, beta=1, alpha=1: beta * c + alpha * (a @ b),
    "argmax": lambda x, dim=None, keepdim=False: jnp.argmax(x, dim, keepdims=keepdim),
    "baddbmm": lambda c, a, b, *, beta=1, alpha=1: beta * c + alpha * (a @ b),
    "bmm": jnp.matmul,
    "copy": lambda x, src, non_blocking=False: jnp.broadcast_to(src, x.shape).astype(
        x.dtype
    ),
    "cumsum": lambda x, dim, **_: jnp.cumsum(x, dim),
    "einsum": lambda equation, operands, **_: jnp.einsum(equation, *operands),
    "embedding": lambda weight, indices, *_: jnp.take(weight, indices, axis=0),
    "expand": expand,
    "flatten": _flatten,
    "flip": lambda x, dims: jnp.flip(x, dims),
    "full_like": lambda x, value, **_: jnp.full_like(x, value),
    "gather": lambda x, dim, index, **_: jnp.take_along_axis(x, index, dim),
    "index": _index,
    "index_select": lambda x, dim, index: jnp.take(x, index, dim),
    "layer_norm": layer_norm,
    "linear": linear,
    "matmul": jnp.matmul,
    "max": jnp.max,
    "min": jnp.min,
    "mm": jnp.matmul,
    "new_full": lambda x, size, value, dtype=None, **_: jnp.full(
        size, value, dtype or x.dtype
    ),
    "new_ones": lambda x, size, dtype=None, **_: jnp.ones(size, dtype or x.dtype),
    "new_zeros": lambda x, size, dtype=None, **_: jnp.zeros(size, dtype or x.dtype),
    "pixel_shuffle": pixel_shuffle,
    "prod": jnp.prod,
    "repeat": lambda x, repeats: jnp.tile(x, repeats),
    "repeat_interleave": lambda x, repeats, dim=None, **_: jnp.repeat(x, repeats, dim),
    "rms_norm": rms_norm,
    "roll": _roll,
    "select": lambda x, dim, index: jnp.take(x, index, dim),
    "select_scatter": _select_scatter,
    "slice_scatter": _slice_scatter,
    "squeeze": _squeeze,
    "stack": lambda tensors, dim=0: jnp.stack(tensors, dim),
    "tril": jnp.tril,
    "triu": jnp.triu,
    "unbind": lambda x, dim=0: [
        jnp.squeeze(one, dim) for one in _split(x, dim % x.ndim, 1)
    ],
    "unflatten": _unflatten,
    "unsqueeze": lambda x, dim: jnp.expand_dims(x, dim),
    "view": lambda x, size: x.reshape(size),
}
PLAIN["new_empty"] = PLAIN["new_zeros"]
PLAIN["reshape"] = PLAIN["_unsafe_view"] = PLAIN["view"]
PLAIN["_reshape_copy"] = PLAIN["view"]


def _with_axis(function, name="dim"):
    """Operator (x, dim, ...) or (x, ..., dim) from one of `on_axis`."""
    apply = on_axis(function)
    if name == "first":
        return lambda x, dim=0, *args, **kwargs: apply(x, *args, dim=dim, **kwargs)
    return lambda x, arg, dim=0: apply(x, arg, dim=dim)


OPERATORS: dict[str, Callable] = {
    **{name: on_plain(function) for name, function in PLAIN.items()},
    **{name: elementwise(function) for name, function in ELEMENTWISE.items()},
    **REDUCTIONS,
    "_native_batch_norm_legit": trained_batch_norm,
    "_native_batch_norm_legit.no_stats": batch_norm_without_statistics,
    "_native_batch_norm_legit_functional": trained_batch_norm,
    "_native_batch_norm_legit_no_training": functools.partial(
        batch_norm, training=False
    ),
    "adaptive_avg_pool1d": adaptive_avg_pool,
    "adaptive_avg_pool2d": adaptive_avg_pool,
    "adaptive_avg_pool3d": adaptive_avg_pool,
    "adaptive_max_pool2d": lambda x, output_size: (adaptive_max_pool(x, output_size),),
    "alias": lambda x: x,
    "arange": _arange,
    "avg_pool1d": avg_pool,
    "avg_pool2d": avg_pool,
    "avg_pool3d": avg_pool,
    "cat": cat,
    "chunk": _with_axis(_chunk),
    "constant_pad_nd": lambda x, padding, value=0: pad(x, padding, value=value),
    "contiguous": lambda x, **_: x,
    "conv1d": conv,
    "conv2d": conv,
    "conv3d": conv,
    "conv_transpose1d": conv_transpose,
    "conv_transpose2d": conv_transpose,
    "conv_transpose3d": conv_transpose,
    "full": _full,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
    "lift_fresh_copy": lambda x: x,
    "linalg_vector_norm": _norm,
    "log_softmax": _with_axis(_log_softmax, "first"),
    "max.dim": _max(jnp.max, jnp.argmax),
    "max.other": elementwise(jnp.maximum),
    "max_pool1d": max_pool,
    "max_pool2d": max_pool,
    "max_pool3d": max_pool,
    "min.dim": _max(jnp.min, jnp.argmin),
    "min.other": elementwise(jnp.minimum),
    "narrow": _with_axis(
        lambda x, axis, start, length: _slice(x, axis, start, start + length), "first"
    ),
    "ones": _filled(1),
    "pad": pad,
    "permute": permute,
    "prelu": prelu,
    "reflection_pad2d": lambda x, padding: pad(x, padding, "reflect"),
    "replication_pad2d": lambda x, padding: pad(x, padding, "replicate"),
    "slice": _with_axis(_slice, "first"),
    "softmax": _with_axis(_softmax, "first"),
    "split": _with_axis(_split),
    "split_with_sizes": _with_axis(_split),
    "sym_size": lambda x, dim: x.shape[dim],
    "t": lambda x: permute(x, [*range(x.ndim)][::-1]),
    "transpose": transpose,
    "upsample_bilinear2d": upsample_linear,
    "upsample_linear1d": upsample_linear,
    "upsample_nearest1d": upsample_nearest,
    "upsample_nearest2d": upsample_nearest,
    "zeros": _filled(0),
}
# On numbers such as the batch's size
NUMBERS: dict[str, Callable] = {
    "add": operator.add,
    "eq": operator.eq,
    "floordiv": operator.floordiv,
    "ge": operator.ge,
    "getitem": operator.getitem,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
    "mod": operator.mod,
    "mul": operator.mul,
    "ne": operator.ne,
    "neg": operator.neg,
    "pow": operator.pow,
    "sub": operator.sub,
    "sym_float": float,
    "sym_max": max,
    "sym_min": min,
    "sym_not": operator.not_,
    "truediv": operator.truediv,
}
