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

import math
from collections.abc import Sequence
from typing import Any

import jax
from flax import linen as nn

from fedfr_jax.models.block_scan import run_stack
from fedfr_jax.models.conv import Conv, ConvSettings, Depthwise, Implementation
from fedfr_jax.models.heads import Pixels
from fedfr_jax.models.linen import (
    block_names,
    from_linen,
    he_normal,
    normal,
    with_remat,
)
from fedfr_jax.models.norm import BatchNorm, PReLU
from fedfr_jax.ranges import Blocks, Width
from fedfr_jax.schema import checked
from fedfr_jax.types import Model

STEM, TOP = 64, 512
# Channels of a stage, those inside its first block, those inside its others.
STAGES = ((64, 128, 128), (128, 256, 256), (128, 512, 256))


@checked
def mobilefacenet(
    input_shape: Sequence[int],
    *,
    blocks: Blocks = (4, 6, 2),
    scale: Width = 1,
    embedding_dim: Width = 128,
    conv_implementation: Implementation = "auto",
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
    if len(blocks) != len(STAGES):
        raise ValueError(
            f"blocks must be {len(STAGES)} integers >= 0, one per stage, got "
            f"{tuple(blocks)}."
        )
    module = MobileFaceNet(
        blocks=tuple(blocks),
        scale=scale,
        embedding_dim=embedding_dim,
        settings=ConvSettings(conv_implementation, dtype),
        scan_blocks=scan_blocks,
        remat=remat,
    )
    stages = {f"stage{i}": num + 1 for i, num in enumerate(blocks, 1)}
    top = ["top", "pixels", "bn", "fc", "bn_out"]
    units = ["stem", "stem2", *block_names(stages), *top]
    return from_linen(module, input_shape, embedding_dim, blocks=units, stages=stages)


class MobileFaceNet(nn.Module):
    """Flax module; see `mobilefacenet` for its attributes."""

    blocks: tuple[int, ...]
    scale: int
    embedding_dim: int
    settings: ConvSettings
    scan_blocks: bool
    remat: bool

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> [B, D]."""
        param_dtype, settings = x.dtype, self.settings
        x = Unit(STEM * self.scale, settings, size=3, stride=2, name="stem")(x, train)
        x = ByChannel(settings, name="stem2")(x, train)
        for i, (num, sizes) in enumerate(zip(self.blocks, STAGES, strict=True), 1):
            width, *inside = sizes
            stage = Stage(
                width * self.scale,
                tuple(inside),
                num,
                scan_blocks=self.scan_blocks,
                remat=self.remat,
                settings=settings,
                name=f"stage{i}",
            )
            x = stage(x, train)
        x = Unit(TOP, settings, name="top")(x, train).astype(param_dtype)
        x = BatchNorm(name="bn")(Pixels(name="pixels")(x), train)
        init = normal(math.sqrt(2 / self.embedding_dim))  # He normal of the fan-out
        fc = nn.Dense(self.embedding_dim, use_bias=False, kernel_init=init, name="fc")
        return BatchNorm(name="bn_out")(fc(x), train)


class Stage(nn.Module):
    """A block of stride 2, then equal residual blocks."""

    width: int
    inside: tuple[int, int]  # channels inside the first block, inside the others
    num_blocks: int  # without the first
    scan_blocks: bool
    remat: bool
    settings: ConvSettings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, ceil(H / 2), ceil(W / 2), width]."""
        block = with_remat(Block) if self.remat else Block
        inside_first, inside_rest = self.inside
        first = block(self.width, inside_first, self.settings, stride=2, name="first")
        x = first(x, train)
        if not self.num_blocks:
            return x
        stack = block(self.width, inside_rest, self.settings, name="blocks")
        return run_stack(stack, x, train, length=self.num_blocks, scan=self.scan_blocks)


class Block(nn.Module):
    """Inverted bottleneck: 1x1, depthwise 3x3, 1x1; residual at stride 1."""

    width: int
    inside: int
    settings: ConvSettings
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, width], rounded up."""
        settings = self.settings
        y = Unit(self.inside, settings, name="expand")(x, train)
        y = ByChannel(settings, self.stride, name="depthwise")(y, train)
        y = Unit(self.width, settings, is_linear=True, name="project")(y, train)
        return x + y if self.stride == 1 else y


class Unit(nn.Module):
    """Convolution, BN and, unless `is_linear`, PReLU."""

    width: int
    settings: ConvSettings
    size: int = 1
    stride: int = 1
    is_linear: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, width], rounded up."""
        conv = Conv(
            self.width,
            kernel_size=self.size,
            stride=self.stride,
            padding=self.size // 2,
            kernel_init=he_normal(),
            settings=self.settings,
            name="conv",
        )
        x = BatchNorm(name="bn")(conv(x), train)
        return x if self.is_linear else PReLU(name="prelu")(x)


class ByChannel(nn.Module):
    """Depthwise 3x3 convolution, BN, PReLU."""

    settings: ConvSettings
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> [B, H / stride, W / stride, C], rounded up."""
        settings = self.settings
        conv = Depthwise(self.stride, settings, name="conv")
        x = conv(x)
        return PReLU(name="prelu")(BatchNorm(name="bn")(x, train))
