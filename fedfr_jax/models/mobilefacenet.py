"""MobileFaceNet: a face network of inverted bottlenecks with a million parameters.

Chen et al., "MobileFaceNets", arXiv:1804.07573, table 1; its embedding has 128 numbers.
A block is a 1x1 convolution to more channels, a depthwise 3x3 and a 1x1 one back, all
with BN, the first two with PReLU; blocks of stride 1 add their input. The last map is
summed over pixels with a number per pixel and channel (the global depthwise
convolution). Convolutions start as He normal, as in the released codes.
Deviation: `scale` multiplies all channels but those inside blocks, as there; their
convolution behind the stem is grouped by `scale` then, ours is depthwise.

Parameters, every bn is {scale, bias}, with batch_stats {mean, var} at the same path:
  stem/{conv/kernel [3, 3, C', C], bn, prelu/slope}, stem2/{depthwise, bn, prelu}
  stage<i>/block1/{expand, depthwise, project}, each with kernel and bn, the first two
    with prelu; the others the same, in a stack block[2:n + 1]
  top/{conv/kernel [1, 1, C', 512], bn, prelu}, pixels/kernel [h, w, 512], bn,
  fc/kernel [512, D], bn_out/{scale, bias}
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from flax import linen as nn

from fedfr_jax.models.block_scan import Stage, with_remat
from fedfr_jax.models.heads import Pixels
from fedfr_jax.models.layers import ConvNorm, LayerSettings, depthwise
from fedfr_jax.models.linen import Network, block_names, from_linen, normal
from fedfr_jax.models.norm import BatchNorm, PReLU
from fedfr_jax.ranges import BlockCount, Width
from fedfr_jax.schema import checked
from fedfr_jax.types import Model

STEM, TOP = 64, 512
# Channels of a stage, those inside its first block, those inside its others.
STAGES = ((64, 128, 128), (128, 256, 256), (128, 512, 256))


@checked
def mobilefacenet(
    input_shape: Sequence[int],
    *,
    blocks: tuple[BlockCount, BlockCount, BlockCount] = (4, 6, 2),
    scale: Width = 1,
    embedding_dim: Width = 128,
    dtype: Any = None,
    scan_blocks: bool = True,
    remat: bool = False,
) -> Model:
    """MobileFaceNet for face recognition.

    Args:
      input_shape: (H, W, C); the stem and every stage halve H and W, rounding up.
      blocks: blocks of stride 1 in each of the three stages.
      scale: times the channels between blocks; 2 in insightface's mbf.
    """
    unit, settings = (
        functools.partial(ConvNorm, activation="prelu"),
        LayerSettings(dtype),
    )

    def forward(network, x, train):  # [B, H, W, C] -> [B, D]
        param_dtype = x.dtype
        x = unit(STEM * scale, settings, stride=2, name="stem")(x, train)
        x = ByChannel(settings, name="stem2")(x, train)
        for i, (num, sizes) in enumerate(zip(blocks, STAGES, strict=True), 1):
            width, inside_first, inside = sizes
            block = functools.partial(Block, scale * width, inside, settings)
            first = functools.partial(
                with_remat(Block, remat), scale * width, inside_first, settings, 2
            )
            x = Stage(first, block, num, scan_blocks, remat, name=f"stage{i}")(x, train)
        x = unit(TOP, settings, size=1, name="top")(x, train).astype(param_dtype)
        x = BatchNorm(name="bn")(Pixels(name="pixels")(x), train)
        init = normal(math.sqrt(2 / embedding_dim))  # He normal of the fan-out
        fc = nn.Dense(embedding_dim, use_bias=False, kernel_init=init, name="fc")
        return BatchNorm(name="bn_out")(fc(x), train)

    stages = {f"stage{i}": num + 1 for i, num in enumerate(blocks, 1)}
    top = ["top", "pixels", "bn", "fc", "bn_out"]
    units = ["stem", "stem2", *block_names(stages), *top]
    network = Network(forward)
    return from_linen(network, input_shape, embedding_dim, blocks=units, stages=stages)


class Block(nn.Module):
    """Inverted bottleneck: 1x1, depthwise 3x3, 1x1; residual at stride 1."""

    width: int
    inside: int
    settings: LayerSettings
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, width], rounded up."""
        unit = functools.partial(ConvNorm, settings=self.settings, size=1)
        y = unit(self.inside, activation="prelu", name="expand")(x, train)
        y = ByChannel(self.settings, self.stride, name="depthwise")(y, train)
        y = unit(self.width, name="project")(y, train)
        return x + y if self.stride == 1 else y


class ByChannel(nn.Module):
    """Depthwise 3x3 convolution, BN, PReLU."""

    settings: LayerSettings
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> [B, H / stride, W / stride, C], rounded up."""
        by_channel = depthwise(
            x.shape[-1], self.settings, stride=self.stride, name="conv"
        )
        x = by_channel(x)
        return PReLU(name="prelu")(BatchNorm(name="bn")(x, train))
