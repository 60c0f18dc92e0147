"""Convolutions with the settings of a network, and with their normalization.

They are flax's own: what computes them is decided where a function is traced, see
`convolutions`. Padding is explicit and symmetric, as in PyTorch.
"""

import math
from typing import Any, Literal, NamedTuple

import jax
from flax import linen as nn

from fedfr_jax.models.linen import he_normal, normal
from fedfr_jax.models.norm import BatchNorm, GroupNorm, PReLU

Norm = Literal["batch", "group"]


class LayerSettings(NamedTuple):
    """Settings of all layers of a network."""

    dtype: Any = None  # of convolutions; None: the kernel's
    norm: str = "batch"  # a `Norm`
    norm_groups: int = 32  # of group normalization


HE_NORMAL = he_normal()


def same_conv(
    features: int,
    settings: LayerSettings,
    *,
    name: str,
    size: int = 3,
    stride: int = 1,
    use_bias: bool = False,
    kernel_init: nn.initializers.Initializer = HE_NORMAL,
    groups: int = 1,
) -> nn.Conv:
    """Convolution with 'same' padding: only the stride makes the image smaller."""
    return nn.Conv(
        features,
        (size, size),
        stride,
        padding=size // 2,
        feature_group_count=groups,
        use_bias=use_bias,
        dtype=settings.dtype,
        kernel_init=kernel_init,
        name=name,
    )


def depthwise(
    channels: int, settings: LayerSettings, *, stride: int, name: str
) -> nn.Conv:
    """3x3 convolution of each channel; He normal, as 9 values come from a pixel."""
    init = normal(math.sqrt(2 / 9))
    return same_conv(
        channels, settings, stride=stride, kernel_init=init, groups=channels, name=name
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
