"""Convolution of tensors [B, C, *space]."""

import jax.numpy as jnp
from jax import lax

from fedfr_jax.models.aten.tensors import (
    channels_last,
    each,
    from_channels_last,
    in_order,
)
from fedfr_jax.models.norm import per_channel


def conv(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Convolution of x [B, I, *space] with weight [O, I / groups, *window]."""
    rank = x.ndim - 2
    stride, dilation = each(stride, rank), each(dilation, rank)
    reach = [d * (n - 1) for d, n in zip(dilation, weight.shape[2:], strict=True)]
    if padding == "same":
        pads = [(total // 2, total - total // 2) for total in reach]
    else:
        padding = 0 if padding == "valid" else padding
        pads = [(p, p) for p in each(padding, rank)]
    kernel = in_order(weight, (*range(2, rank + 2), 1, 0))
    y = _convolve(channels_last(x), kernel, stride, pads, dilation, groups)
    return from_channels_last(add_bias(y, bias))


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


def add_bias(y, bias):
    """Add a bias [C], if there is one, to y [..., C]."""
    return y if bias is None else y + per_channel(bias, y)


def conv_transpose(
    x, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
):
    """Transposed convolution of x [B, I, *space], weight [I, O / groups, *window]."""
    rank = x.ndim - 2
    stride, dilation = each(stride, rank), each(dilation, rank)
    window = range(2, rank + 2)
    kernel = in_order(weight, (*window, 0, 1))  # [*window, I, O / groups]
    kernel = jnp.flip(kernel, range(rank))
    *sizes, inputs, outputs = kernel.shape
    kernel = kernel.reshape(*sizes, groups, inputs // groups, outputs)
    kernel = jnp.moveaxis(kernel, rank, -2)
    kernel = kernel.reshape(*sizes, inputs // groups, groups * outputs)
    padding, more_padding = each(padding, rank), each(output_padding, rank)
    pads = []
    for size, step, pad, more in zip(
        sizes, dilation, padding, more_padding, strict=True
    ):
        around = step * (size - 1) - pad
        pads.append((around, around + more))
    ones = [1] * rank
    y = _convolve(channels_last(x), kernel, ones, pads, dilation, groups, stride)
    return from_channels_last(add_bias(y, bias))


OPERATORS = {
    "conv1d": conv,
    "conv2d": conv,
    "conv_transpose2d": conv_transpose,
}
