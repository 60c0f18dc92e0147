"""Convolutions whose implementation can be chosen, and with their normalization.

The fastest implementation is not always XLA's. Inside a loop XLA:CPU runs its own
convolution about ten times slower than a matrix product, and per-client kernels (vmap)
turn it into a grouped convolution.

"auto" is XLA's except on the CPU; there it is "winograd" for 3x3 kernels at stride 1
with at least 8 channels on both sides and 32 tiles of output (training takes a quarter
to four fifths of the time of "im2col", the fewer channels the longer), and "im2col" for
all others. "winograd" has no forward-mode derivative (jax.jvp).

"auto" goes by the devices that a program is traced for, see `mesh.platform`, so that a
round can be compiled for devices that this machine does not have.

Padding is explicit and symmetric, as in PyTorch.

Depthwise 3x3 convolution: on a CPU it is the sum of nine shifted images, each times one
number per channel, which XLA fuses. Forward and backward in a loop, two cores: 32
images of 32x32x32 take 6.5 ms, as XLA's grouped convolution 565 ms; four clients' 32
images of 16x16x64, vmapped, 15 ms and 7.6 s, with 39 s to compile (2026-11-23).
Elsewhere "auto" is XLA's.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from fedfr_jax import mesh
from fedfr_jax.models.linen import he_normal, normal, xavier_uniform
from fedfr_jax.models.norm import BatchNorm, GroupNorm, PReLU, per_channel
from fedfr_jax.models.winograd import convolve_3x3, sliding_windows, tiling
from fedfr_jax.schema import checked

AUTO = "auto"
Implementation = Literal["auto", "xla", "im2col", "winograd"]


Norm = Literal["batch", "group"]


class LayerSettings(NamedTuple):
    """Settings of all layers of a network."""

    conv_implementation: str = AUTO
    dtype: Any = None  # of convolutions; None: the kernel's
    norm: str = "batch"  # a `Norm`
    norm_groups: int = 32  # of group normalization


# Traced once for each shape, as a network has many of one.
@functools.partial(
    jax.jit, static_argnames=("stride", "padding", "implementation"), inline=True
)
@checked
def convolve(
    x: jax.Array,
    kernel: jax.Array,
    *,
    stride: int = 1,
    padding: int = 0,
    implementation: Implementation = AUTO,
) -> jax.Array:
    """Cross-correlate images with a kernel.

    Args:
      x: [B, H, W, I] images.
      kernel: [kh, kw, I, O], of x's dtype.
      stride: step along both axes, at least 1.
      padding: zeros added on each of the four sides.
      implementation: one of IMPLEMENTATIONS, or "auto": the fastest on the devices that
        are traced for.

    Returns:
      [B, (H + 2 padding - kh) // stride + 1, (W + ...) // stride + 1, O].
    """
    if implementation == AUTO:
        implementation = _fastest_implementation(x, kernel, stride, padding)
    return IMPLEMENTATIONS[implementation](x, kernel, stride, padding)


def _fastest_implementation(x, kernel, stride, padding):
    """Choose the implementation that was measured fastest on the traced platform.

    Winograd's needs channels enough to hide its transforms of the image and tiles
    enough to hide that of the kernel.
    """
    if mesh.platform() != "cpu":
        return "xla"
    if not _fits_winograd(kernel, stride) or min(kernel.shape[2:]) < 8:
        return "im2col"
    height, width = (n + 2 * padding - 2 for n in x.shape[1:3])
    is_large = min(height, width) > 1 and tiling(len(x), height, width).tiles >= 32
    return "winograd" if is_large else "im2col"


class Conv(nn.Module):
    """Square convolution of NHWC images; params kernel [k, k, I, O] and bias [O]."""

    features: int
    kernel_size: int = 3
    stride: int = 1
    padding: int = 0
    use_bias: bool = False
    kernel_init: nn.initializers.Initializer = xavier_uniform()
    settings: LayerSettings = LayerSettings()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, I] -> [B, H', W', features], H' as in `convolve`."""
        shape = (self.kernel_size, self.kernel_size, x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape)
        dtype = self.settings.dtype or kernel.dtype
        y = convolve(
            x.astype(dtype),
            kernel.astype(dtype),
            stride=self.stride,
            padding=self.padding,
            implementation=self.settings.conv_implementation,
        )
        if not self.use_bias:
            return y
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return y + per_channel(bias.astype(dtype), y)


def _xla(x, kernel, stride, padding, groups=1):
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        ((padding, padding), (padding, padding)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


# Without the checkpoint the patches, kh * kw times the activations, would be stored
# for the backward pass; recomputing them costs no measurable time.
@functools.partial(jax.checkpoint, static_argnums=(2, 3), prevent_cse=False)
def _im2col(x, kernel, stride, padding):
    """One product of patches [B H' W', kh kw I] and the kernel [kh kw I, O]."""
    kh, kw, _, out_features = kernel.shape
    x = _pad(x, padding)
    # One axis after the other: half the compile time of kh * kw slices at once.
    for axis, size in ((2, kw), (1, kh)):
        x = sliding_windows(x, axis, size, stride, to=3)
        x = x.reshape(*x.shape[:3], -1)
    y = x.reshape(-1, x.shape[-1]) @ kernel.reshape(-1, out_features)
    return y.reshape(*x.shape[:3], out_features)


def _winograd(x, kernel, stride, padding):
    """Winograd's algorithm; `_im2col` for other kernel sizes and strides."""
    if not _fits_winograd(kernel, stride):
        return _im2col(x, kernel, stride, padding)
    return convolve_3x3(x, kernel, padding)


def _fits_winograd(kernel, stride):
    return kernel.shape[:2] == (3, 3) and stride == 1


def _pad(x, padding):
    return jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))


IMPLEMENTATIONS = {"xla": _xla, "im2col": _im2col, "winograd": _winograd}


@functools.partial(jax.jit, static_argnames=("stride", "implementation"), inline=True)
def depthwise(
    x: jax.Array, kernel: jax.Array, *, stride: int = 1, implementation: str = AUTO
) -> jax.Array:
    """Cross-correlate each channel with its 3x3 kernel, with zero padding.

    Args:
      x: [B, H, W, C] images.
      kernel: [3, 3, 1, C], of x's dtype.
      stride: step along both axes, at least 1.
      implementation: "xla", or another of `conv.IMPLEMENTATIONS` for shifted images, or
        "auto".

    Returns:
      [B, ceil(H / stride), ceil(W / stride), C].
    """
    if implementation == AUTO:
        implementation = "im2col" if mesh.platform() == "cpu" else "xla"
    if implementation == "xla":
        return _xla(x, kernel, stride, 1, groups=x.shape[-1])
    return _shifted(x, kernel, stride)


def _shifted(x, kernel, stride):
    """Sum of nine shifted images, each times its entry of the kernel."""
    height, width = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    pixels = lambda i, j: x[:, i : i + height : stride, j : j + width : stride]

    def row(i):
        first, second, third = (
            pixels(i, j) * kernel[None, None, i, j] for j in range(3)
        )
        return first + second + third

    return row(0) + row(1) + row(2)


class Depthwise(nn.Module):
    """3x3 depthwise convolution of NHWC images; params kernel [3, 3, 1, C]."""

    stride: int = 1
    settings: LayerSettings = LayerSettings()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, C] -> [B, ceil(H / stride), ceil(W / stride), C]."""
        init = normal(math.sqrt(2 / 9))  # He normal, as 9 values come from a pixel
        kernel = self.param("kernel", init, (3, 3, 1, x.shape[-1]))
        dtype = self.settings.dtype or kernel.dtype
        return depthwise(
            x.astype(dtype),
            kernel.astype(dtype),
            stride=self.stride,
            implementation=self.settings.conv_implementation,
        )


HE_NORMAL = he_normal()


def same_conv(
    features: int,
    settings: LayerSettings,
    *,
    name: str,
    size: int = 3,
    stride: int = 1,
    kernel_init: nn.initializers.Initializer = HE_NORMAL,
) -> Conv:
    """Convolution with 'same' padding: only the stride makes the image smaller."""
    return Conv(
        features,
        kernel_size=size,
        stride=stride,
        padding=size // 2,
        kernel_init=kernel_init,
        settings=settings,
        name=name,
    )


def build_norm(settings: LayerSettings, number: int | str = "") -> nn.Module:
    """Batch normalization "bn<number>" or group normalization "gn<number>"."""
    if settings.norm == "group":
        return GroupNorm(settings.norm_groups, name=f"gn{number}")
    return BatchNorm(name=f"bn{number}")


class ConvNorm(nn.Module):
    """Convolution with 'same' padding, normalization and, perhaps, an activation."""

    features: int
    settings: LayerSettings
    size: int = 3
    stride: int = 1
    activation: Literal["", "relu", "prelu"] = ""
    kernel_init: nn.initializers.Initializer = HE_NORMAL

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, features], rounded up."""
        conv = same_conv(
            self.features,
            self.settings,
            size=self.size,
            stride=self.stride,
            kernel_init=self.kernel_init,
            name="conv",
        )
        x = build_norm(self.settings)(conv(x), train)
        if self.activation == "prelu":
            return PReLU(name="prelu")(x)
        return nn.relu(x) if self.activation == "relu" else x
