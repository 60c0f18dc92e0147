"""MobileNet-v1: depthwise separable convolutions, for classification.

Howard et al., "MobileNets: Efficient Convolutional Neural Networks for Mobile Vision
Applications", arXiv:1704.04861, table 1. A block is a 3x3 depthwise and a 1x1
convolution, each with normalisation and ReLU. Convolutions start as He normal of the
fan-out. Deviations: the "cifar" stem has stride 1, as images of 32 pixels need; fewer
than 13 blocks leave out some of the five that keep 512 channels. FedPer
(arXiv:1912.00818) tells of 11 blocks and not which: that they are 13 without two of
those five is ours.

Parameters, C = channels of the block; every bn (gn with group normalisation) is {scale,
bias} [C], a bn with batch_stats {mean, var} [C] at the same path:
  stem/conv/kernel [3, 3, C', C], stem/bn
  block<j>/depthwise/kernel [3, 3, 1, C'], bn1, pointwise/kernel [1, 1, C', C], bn2
  fc/kernel [C, M], bias [M]
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax.models.conv import Conv
from fedfr_jax.models.depthwise import Depthwise
from fedfr_jax.models.initial import he_normal, uniform
from fedfr_jax.models.linen import from_linen, rematerialised, sow_features
from fedfr_jax.models.norm import BatchNorm, GroupNorm
from fedfr_jax.types import Model

STEM = 32  # channels of the stem
# (channels, stride) of the blocks before and after those that keep 512 channels
BEFORE = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2))
MIDDLE, MOST_MIDDLE = (512, 1), 5
AFTER = ((1024, 2), (1024, 1))
FEWEST = len(BEFORE) + len(AFTER)
STEMS = ("cifar", "imagenet")
NORMS = ("batch", "group")


def mobilenet(
    image_shape: Sequence[int],
    *,
    num_classes: int,
    num_blocks: int = 13,
    width: float = 1.0,
    stem: str = "cifar",
    norm: str = "batch",
    groups: int = 32,
    lowering: str = "auto",
    dtype: Any = None,
    remat: bool = False,
) -> Model:
    """MobileNet-v1; gives logits.

    Args:
      image_shape: (H, W, C); four blocks, and the "imagenet" stem, halve H and W,
        rounding up.
      num_classes: M.
      num_blocks: 13, or fewer down to 8 without some that keep 512 channels; 11 is our
        reading of FedPer's.
      width: times the channels of every layer, rounded; the paper's alpha.
      stem: "cifar", stride 1, or "imagenet", stride 2.
      norm: "batch" or "group", whose groups must divide all channels.
      groups: of group normalisation.
      lowering: how convolutions are computed, see `conv.convolve` and `depthwise`.
      dtype: of the convolutions, such as "bfloat16"; None for the dtype of the
        parameters. Normalisation and the linear layer compute in at least float32.
      remat: training keeps the input of every block only, and computes it again.

    Raises:
      ValueError: for an unknown stem or norm, or numbers out of range.
    """
    most = FEWEST + MOST_MIDDLE
    if not FEWEST <= num_blocks <= most:
        raise ValueError(
            f"num_blocks must lie in [{FEWEST}, {most}], got {num_blocks}."
        )
    if not 0 < width * STEM < 2**20 or round(width * STEM) < 1:
        raise ValueError(f"width must leave the stem a channel, got {width}.")
    for key, value, known in (("stem", stem, STEMS), ("norm", norm, NORMS)):
        if value not in known:
            raise ValueError(f"{key} must be one of {known}, got {value!r}.")
    middle = (MIDDLE,) * (num_blocks - FEWEST)
    layers = [(STEM, 1 if stem == "cifar" else 2), *BEFORE, *middle, *AFTER]
    module = MobileNet(
        layers=tuple((round(width * channels), stride) for channels, stride in layers),
        num_classes=num_classes,
        norm=norm,
        groups=groups,
        lowering=lowering,
        dtype=dtype,
        remat=remat,
    )
    names = [f"block{j + 1}" for j in range(num_blocks)]
    return from_linen(module, image_shape, num_classes, blocks=["stem", *names, "fc"])


class Settings(NamedTuple):
    """What all the layers share; `mobilenet` documents it."""

    norm: str
    groups: int
    lowering: str
    dtype: Any


class MobileNet(nn.Module):
    """The network; `mobilenet` documents its attributes."""

    layers: tuple[tuple[int, int], ...]  # (channels, stride) of the stem and the blocks
    num_classes: int
    norm: str = "batch"
    groups: int = 32
    lowering: str = "auto"
    dtype: Any = None
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> logits [B, M]."""
        param_dtype = x.dtype
        settings = Settings(self.norm, self.groups, self.lowering, self.dtype)
        block = rematerialised(Block) if self.remat else Block
        (channels, stride), *others = self.layers
        x = Stem(channels, stride, settings, name="stem")(x, train)
        for j, (channels, stride) in enumerate(others):
            x = block(channels, stride, settings, name=f"block{j + 1}")(x, train)
        x = sow_features(self, jnp.mean(x.astype(param_dtype), (1, 2)))
        init = uniform(1 / math.sqrt(x.shape[-1]))
        fc = nn.Dense(self.num_classes, kernel_init=init, bias_init=init, name="fc")
        return fc(x)


class Stem(nn.Module):
    """3x3 convolution, normalisation, ReLU."""

    channels: int
    stride: int
    settings: Settings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, C], rounded up."""
        x = _conv(self.channels, 3, self.stride, self.settings, "conv")(x)
        return nn.relu(_norm(self.settings)(x, train))


class Block(nn.Module):
    """Depthwise 3x3, then 1x1 convolution, each with normalisation and ReLU."""

    channels: int
    stride: int
    settings: Settings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, C], rounded up."""
        settings = self.settings
        by_channel = Depthwise(
            self.stride, settings.dtype, settings.lowering, name="depthwise"
        )
        x = nn.relu(_norm(settings, 1)(by_channel(x), train))
        x = _conv(self.channels, 1, 1, settings, "pointwise")(x)
        return nn.relu(_norm(settings, 2)(x, train))


def _conv(channels, size, stride, settings, name):
    return Conv(
        channels,
        kernel_size=size,
        stride=stride,
        padding=size // 2,
        kernel_init=he_normal(),
        dtype=settings.dtype,
        lowering=settings.lowering,
        name=name,
    )


def _norm(settings, number=""):
    """Batch normalisation "bn<number>" or group normalisation "gn<number>"."""
    if settings.norm == "group":
        return GroupNorm(settings.groups, name=f"gn{number}")
    return BatchNorm(name=f"bn{number}")
