"""MobileNet-v1: depthwise separable convolutions, for classification.

Howard et al., "MobileNets: Efficient Convolutional Neural Networks for Mobile Vision
Applications", arXiv:1704.04861, table 1. A block is a 3x3 depthwise and a 1x1
convolution, each with normalization and ReLU. Convolutions start as He normal of the
fan-out. Deviations: the "cifar" stem has stride 1, as images of 32 pixels need; fewer
than 13 blocks leave out some of the five that keep 512 channels. FedPer
(arXiv:1912.00818) has 11 blocks without a list of them: here two of those five are left
out.

Parameters, C = channels of the block; every bn (gn with group normalization) is {scale,
bias} [C], a bn with batch_stats {mean, var} [C] at the same path:
  stem/conv/kernel [3, 3, C', C], stem/bn
  block<j>/depthwise/kernel [3, 3, 1, C'], bn1, pointwise/kernel [1, 1, C', C], bn2
  fc/kernel [C, M], bias [M]
"""

from collections.abc import Sequence
from typing import Any

import jax
from flax import linen as nn

from fedfr_jax.models.conv import Depthwise, Implementation
from fedfr_jax.models.heads import mean_logits
from fedfr_jax.models.linen import from_linen, with_remat
from fedfr_jax.models.resnet import (
    Convolution,
    LayerSettings,
    Norm,
    StemKind,
    build_conv,
    build_norm,
)
from fedfr_jax.ranges import Count, Depth, Positive, Width
from fedfr_jax.schema import checked
from fedfr_jax.types import Model

STEM = 32  # channels of the stem
# (channels, stride) of the blocks before and after those that keep 512 channels
BEFORE = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2))
MIDDLE, MAX_MIDDLE = (512, 1), 5
AFTER = ((1024, 2), (1024, 1))
MIN_BLOCKS = len(BEFORE) + len(AFTER)
Layer = tuple[int, int]  # channels and stride


@checked
def mobilenet(
    input_shape: Sequence[int],
    *,
    num_classes: Count,
    num_blocks: Depth = 13,
    width: Positive = 1.0,
    stem: StemKind = "cifar",
    norm: Norm = "batch",
    norm_groups: Width = 32,
    conv_implementation: Implementation = "auto",
    dtype: Any = None,
    remat: bool = False,
) -> Model:
    """MobileNet-v1 classifier, with logits as output.

    Args:
      input_shape: (H, W, C); four blocks, and the "imagenet" stem, halve H and W,
        rounding up.
      num_blocks: 13, or fewer down to 8 without some that keep 512 channels; 11 is our
        reading of FedPer's.
      width: times the channels of every layer, rounded; the paper's alpha.
      stem: "cifar", stride 1, or "imagenet", stride 2.
      norm: "batch" or "group", whose groups must divide all channels.
      norm_groups: of group normalization.
    """
    layers = parse_layers(num_blocks, width, stem)
    settings = LayerSettings(norm, norm_groups, conv_implementation, dtype)
    module = MobileNet(layers, num_classes, settings, remat)
    names = [*block_names_of(layers), "fc"]
    return from_linen(module, input_shape, num_classes, blocks=names)


def parse_layers(num_blocks: int, width: float, stem: str) -> tuple[Layer, ...]:
    """Layers (channels, stride): the stem, then the blocks."""
    max_blocks = MIN_BLOCKS + MAX_MIDDLE
    if not MIN_BLOCKS <= num_blocks <= max_blocks:
        raise ValueError(
            f"num_blocks must be in [{MIN_BLOCKS}, {max_blocks}], got {num_blocks}."
        )
    if not 0 < width * STEM < 2**20 or round(width * STEM) < 1:
        raise ValueError(
            f"width must give the stem between 1 and 2^20 channels, got {width}."
        )
    middle = (MIDDLE,) * (num_blocks - MIN_BLOCKS)
    layers = [(STEM, 1 if stem == "cifar" else 2), *BEFORE, *middle, *AFTER]
    return tuple((round(width * channels), stride) for channels, stride in layers)


def block_names_of(layers: tuple[Layer, ...]) -> list[str]:
    """Path prefixes of the parameters of `layers`."""
    return ["stem", *(f"block{j}" for j in range(1, len(layers)))]


def block_maps(
    layers: tuple[Layer, ...],
    settings: LayerSettings,
    x: jax.Array,
    train: bool,
    remat: bool = False,
) -> list[jax.Array]:
    """Apply the blocks; return the last map of each spatial size, first to last.

    For the call of a module, which then has the blocks' parameters.
    """
    block = with_remat(Block) if remat else Block
    maps = []
    for name, (channels, stride) in zip(block_names_of(layers), layers, strict=True):
        layer = block if maps else Stem
        x = layer(channels, stride, settings, name=name)(x, train)
        # It replaces the last map if both have the same size.
        maps = [*(maps if stride > 1 else maps[:-1]), x]
    return maps


class MobileNet(nn.Module):
    """Flax module; see `mobilenet` for its attributes."""

    layers: tuple[Layer, ...]  # of the stem and the blocks
    num_classes: int
    settings: LayerSettings
    remat: bool

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> logits [B, M]."""
        maps = block_maps(self.layers, self.settings, x, train, self.remat)
        return mean_logits(self, maps[-1], x.dtype)


class Stem(nn.Module):
    """3x3 convolution, normalization, ReLU."""

    channels: int
    stride: int
    settings: LayerSettings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, C], rounded up."""
        convolution = Convolution(self.channels, stride=self.stride)
        x = build_conv(convolution, self.settings, "conv")(x)
        return nn.relu(build_norm(self.settings)(x, train))


class Block(nn.Module):
    """Depthwise 3x3, then 1x1 convolution, each with normalization and ReLU."""

    channels: int
    stride: int
    settings: LayerSettings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, C], rounded up."""
        settings = self.settings
        by_channel = Depthwise(self.stride, settings, name="depthwise")
        x = nn.relu(build_norm(settings, 1)(by_channel(x), train))
        x = build_conv(Convolution(self.channels, 1), settings, "pointwise")(x)
        return nn.relu(build_norm(settings, 2)(x, train))
