"""Convolution on a CPU: Winograd's algorithm, patches, or shifted images.

Inside a loop XLA:CPU runs its own convolution about ten times slower than a matrix
product, and per-client kernels (vmap) turn it into a grouped convolution.

3x3 kernels at stride 1 with at least 8 channels on both sides and 32 tiles of output
are convolved by Winograd's algorithm (training takes a quarter to four fifths of the
time of patches, the fewer channels the longer). All others are one product of patches
and kernel; in two dimensions, without groups and dilation, both have no forward-mode
derivative (jax.jvp). Depthwise ones are sums of shifted images, each times one number
per channel, which XLA fuses. Depthwise 3x3 forward and backward in a loop, two cores:
32 images of 32x32x32 take 6.5 ms, as XLA's grouped convolution 565 ms; four clients' 32
images of 16x16x64, vmapped, 15 ms and 7.6 s, with 39 s to compile (2026-11-23).
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fedfr_jax.convolutions.patches import convolve_patches
from fedfr_jax.convolutions.pooling import MAX_WINDOW, windows_of
from fedfr_jax.convolutions.winograd import convolve_3x3, sliding_windows, tiling


def convolution(
    x: jax.Array,
    kernel: jax.Array,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: lax.ConvDimensionNumbers,
    feature_group_count: int,
    batch_group_count: int,
    preferred_element_type: jax.typing.DTypeLike | None,
    **_,
) -> jax.Array | None:
    """`lax.conv_general_dilated` with its parameters.

    None, which leaves it to XLA, for integers and windows that are too long to compile,
    or have no axis.
    """
    numbers, groups = dimension_numbers, feature_group_count
    window = [kernel.shape[axis] for axis in numbers.rhs_spec[2:]]
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    if not (is_float and window and max(window) <= MAX_WINDOW):
        return None
    x = x.transpose(_channels_last(numbers.lhs_spec))  # [B, *space, C]
    kernel = kernel.transpose(*numbers.rhs_spec[2:], *numbers.rhs_spec[1::-1])
    if preferred_element_type is not None:
        x, kernel = (a.astype(preferred_element_type) for a in (x, kernel))
    if batch_group_count > 1:  # groups of the batch become groups of channels
        groups = batch_group_count
        x = jnp.moveaxis(x.reshape(groups, -1, *x.shape[1:]), 0, -2)
        x = x.reshape(*x.shape[:-2], -1)
    first, *other = {*sum(padding, ())}
    is_plain = x.ndim == 4 and len({*window_strides}) == 1
    is_plain &= groups == 1 and {*lhs_dilation, *rhs_dilation} == {1}
    if not is_plain or other or first < 0:
        inner = [(*p, d - 1) for p, d in zip(padding, lhs_dilation, strict=True)]
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *inner, (0, 0, 0)])
        first = 0
    if is_plain:
        y = convolve(x, kernel, stride=window_strides[0], padding=first)
    elif kernel.shape[-2] == 1 and groups > 1:
        y = _shifted(x, kernel, window_strides, rhs_dilation)
    else:
        y = _patches(x, kernel, window_strides, rhs_dilation, groups)
    back = sorted(range(y.ndim), key=_channels_last(numbers.out_spec).__getitem__)
    return y.transpose(back)


def _channels_last(spec):
    """Axes of (batch, channels, *space) as batch, *space, channels."""
    return spec[0], *spec[2:], spec[1]


# Traced once for each shape, as a network has many of one.
@functools.partial(jax.jit, static_argnames=("stride", "padding"), inline=True)
def convolve(
    x: jax.Array, kernel: jax.Array, *, stride: int = 1, padding: int = 0
) -> jax.Array:
    """Cross-correlate images with a kernel, in the way that was measured fastest.

    Winograd's needs channels enough to hide its transforms of the image and tiles
    enough to hide that of the kernel.

    Args:
      x: [B, H, W, I] images.
      kernel: [kh, kw, I, O], of x's dtype.
      stride: step along both axes, at least 1.
      padding: zeros added on each of the four sides.

    Returns:
      [B, (H + 2 padding - kh) // stride + 1, (W + ...) // stride + 1, O].
    """
    if kernel.shape[:2] == (3, 3) and stride == 1 and min(kernel.shape[2:]) >= 8:
        height, width = (n + 2 * padding - 2 for n in x.shape[1:3])
        if min(height, width) > 1 and tiling(len(x), height, width).tiles >= 32:
            return convolve_3x3(x, kernel, padding)
    return by_patches(x, kernel, stride=stride, padding=padding)


def by_patches(
    x: jax.Array, kernel: jax.Array, *, stride: int = 1, padding: int = 0
) -> jax.Array:
    """`convolve` as one product of patches and the kernel."""
    x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    return convolve_patches(x, kernel, stride)


@functools.partial(jax.jit, static_argnums=(2, 3, 4), inline=True)
# Without the checkpoint the patches, kh * kw times the activations, would be stored
# for the backward pass; recomputing them costs no measurable time.
@functools.partial(jax.checkpoint, static_argnums=(2, 3, 4), prevent_cse=False)
def _patches(x, kernel, strides, dilation, groups):
    """Products of patches of x [B, *space, C] and a kernel [*window, C / groups, O]."""
    *window, in_features, out_features = kernel.shape
    # One axis after the other: half the compile time of kh * kw slices at once.
    for axis in reversed(range(1, x.ndim - 1)):
        size, step, spread = (a[axis - 1] for a in (window, strides, dilation))
        if spread == 1:
            x = sliding_windows(x, axis, size, step, to=x.ndim - 1)
        else:
            x = jnp.stack(windows_of(x, axis, size, step, spread), axis=x.ndim - 1)
        x = x.reshape(*x.shape[:-2], -1)
    space = x.shape[:-1]
    if groups == 1:
        y = x.reshape(-1, x.shape[-1]) @ kernel.reshape(-1, out_features)
    else:
        patches = x.reshape(-1, math.prod(window), groups, in_features)
        kernel = kernel.reshape(math.prod(window), in_features, groups, -1)
        y = jnp.einsum("bwgi,wigo->bgo", patches, kernel)
    return y.reshape(*space, out_features)


@functools.partial(jax.jit, static_argnums=(2, 3), inline=True)
def _shifted(x, kernel, strides, dilation):
    """Sums of shifted x [B, *space, C], each times its entry of [*window, 1, m C]."""
    *window, _, out_features = kernel.shape
    repeats = out_features // x.shape[-1]  # outputs of a channel are neighbors

    def total(x, kernel, axis):
        if axis == x.ndim - 1:
            x = jnp.repeat(x, repeats, axis=-1) if repeats > 1 else x
            return x * kernel.reshape((1,) * axis + (-1,))
        size, step, spread = (a[axis - 1] for a in (window, strides, dilation))
        shifted = windows_of(x, axis, size, step, spread)
        terms = [total(x, kernel[i], axis + 1) for i, x in enumerate(shifted)]
        return functools.reduce(jnp.add, terms)

    return total(x, kernel, 1)
