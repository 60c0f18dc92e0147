"""A 3x3 convolution of every channel by itself.

On a CPU it is the sum of nine shifted images, each times one number per channel, which
XLA fuses. Forward and backward in a loop, two cores: 32 images of 32x32x32 take 6.5 ms,
as XLA's grouped convolution 565 ms; four clients' 32 images of 16x16x64, vmapped, 15 ms
and 7.6 s, with 39 s to compile (2026-11-23). Elsewhere "auto" is XLA's.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from fedfr_jax import devices
from fedfr_jax.models import conv
from fedfr_jax.models.initial import normal
from fedfr_jax.schema import check_choice


@functools.partial(jax.jit, static_argnames=("stride", "implementation"), inline=True)
def depthwise(
    x: jax.Array, kernel: jax.Array, *, stride: int = 1, implementation: str = conv.AUTO
) -> jax.Array:
    """Cross-correlate each channel with a 3x3 kernel of its own, zeros around it.

    Args:
      x: [B, H, W, C] images.
      kernel: [3, 3, 1, C], of x's dtype.
      stride: step along both axes, at least 1.
      implementation: "xla", or another of `conv.IMPLEMENTATIONS` for shifted images, or
        "auto".

    Returns:
      [B, ceil(H / stride), ceil(W / stride), C].

    Raises:
      ValueError: when the implementation is unknown.
    """
    if implementation == conv.AUTO:
        implementation = "im2col" if devices.platform() == "cpu" else "xla"
    known = (conv.AUTO, *conv.IMPLEMENTATIONS)
    check_choice("implementation", implementation, known)
    return (_grouped if implementation == "xla" else _shifted)(x, kernel, stride)


def _grouped(x, kernel, stride):
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        ((1, 1), (1, 1)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1],
    )


def _shifted(x, kernel, stride):
    """The sum over the kernel's places of every stride-th pixel from there."""
    height, width = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    pixels = lambda i, j: x[:, i : i + height : stride, j : j + width : stride]
    row = lambda i: sum(pixels(i, j) * kernel[None, None, i, j] for j in range(3))
    return row(0) + row(1) + row(2)


class Depthwise(nn.Module):
    """3x3 depthwise convolution of NHWC images; params kernel [3, 3, 1, C]."""

    stride: int = 1
    dtype: jax.typing.DTypeLike | None = None  # of the computation; None: the kernel's
    implementation: str = conv.AUTO

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, C] -> [B, ceil(H / stride), ceil(W / stride), C]."""
        init = normal(math.sqrt(2 / 9))  # He normal, as 9 values come from a pixel
        kernel = self.param("kernel", init, (3, 3, 1, x.shape[-1]))
        dtype = self.dtype or kernel.dtype
        return depthwise(
            x.astype(dtype),
            kernel.astype(dtype),
            stride=self.stride,
            implementation=self.implementation,
        )
