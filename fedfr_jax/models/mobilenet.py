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
from typing import Annotated, Any

import jax
from annotated_types import Interval
from flax import linen as nn

from fedfr_jax.models.block_scan import with_remat
from fedfr_jax.models.heads import mean_logits
from fedfr_jax.models.layers import (
    ConvNorm,
    LayerSettings,
    Norm,
    build_norm,
    depthwise,
    same_conv,
)
from fedfr_jax.models.linen import Network, from_linen
from fedfr_jax.models.resnet import StemKind, Trunk
from fedfr_jax.ranges import Count, Width
from fedfr_jax.schema import checked
from fedfr_jax.types import Model

STEM = 32  # channels of the stem
# (channels, stride) of the blocks before and after those that keep 512 channels
BEFORE = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2))
MIDDLE, MAX_MIDDLE = (512, 1), 5
AFTER = ((1024, 2), (1024, 1))
MIN_BLOCKS = len(BEFORE) + len(AFTER)
NumBlocks = Annotated[int, Interval(ge=MIN_BLOCKS, le=MIN_BLOCKS + MAX_MIDDLE)]
Multiplier = Annotated[float, Interval(ge=1 / STEM, le=2**10)]  # of all channels


@checked
def mobilenet(
    input_shape: Sequence[int],
    *,
    num_classes: Count,
    num_blocks: NumBlocks = 13,
    width: Multiplier = 1.0,
    stem: StemKind = "cifar",
    norm: Norm = "batch",
    norm_groups: Width = 32,
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
    trunk = mobilenet_trunk(num_blocks, width, stem, remat)
    settings = LayerSettings(dtype, norm, norm_groups)

    def forward(network, x, train):  # [B, H, W, C] -> logits [B, M]
        maps = trunk.maps(settings, x, train)
        return mean_logits(network, maps[-1], num_classes, x.dtype)

    network, units = Network(forward), [*trunk.names, "fc"]
    return from_linen(network, input_shape, num_classes, blocks=units)


def mobilenet_trunk(num_blocks: int, width: float, stem: str, remat: bool) -> Trunk:
    """Stem and blocks of a MobileNet; its maps are the last of each size."""
    layers = parse_layers(num_blocks, width, stem)
    names = ["stem", *(f"block{j}" for j in range(1, len(layers)))]
    block = with_remat(Block, remat)

    def maps(settings, x, train):
        found = []
        for name, (channels, stride) in zip(names, layers, strict=True):
            if name == "stem":
                layer = ConvNorm(
                    channels, settings, stride=stride, activation="relu", name=name
                )
            else:
                layer = block(channels, stride, settings, name=name)
            x = layer(x, train)
            # It replaces the last map if both have the same size.
            found = [*(found if stride > 1 else found[:-1]), x]
        return found

    num_maps = 1 + sum(stride > 1 for _, stride in layers[1:])
    return Trunk(maps, num_maps, tuple(names))


def parse_layers(num_blocks: int, width: float, stem: str) -> list[tuple[int, int]]:
    """(channels, stride) of the stem, then of the blocks."""
    middle = (MIDDLE,) * (num_blocks - MIN_BLOCKS)
    layers = [(STEM, 1 if stem == "cifar" else 2), *BEFORE, *middle, *AFTER]
    return [(round(width * channels), stride) for channels, stride in layers]


class Block(nn.Module):
    """Depthwise 3x3, then 1x1 convolution, each with normalization and ReLU."""

    channels: int
    stride: int
    settings: LayerSettings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, C], rounded up."""
        settings = self.settings
        by_channel = depthwise(
            x.shape[-1], settings, stride=self.stride, name="depthwise"
        )
        x = nn.relu(build_norm(settings, 1)(by_channel(x), train))
        x = same_conv(self.channels, settings, size=1, name="pointwise")(x)
        return nn.relu(build_norm(settings, 2)(x, train))
