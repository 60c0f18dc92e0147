"""ConvNeXt: convolutional networks with the layers of a transformer.

Liu et al., "A ConvNet for the 2020s", arXiv:2201.03545, figure 4 and table 9, with the
names of torchvision's and timm's files, see `bases`. Deviation: there is no stochastic
depth.

Parameters, C = width of the stage, C' of the one before; every norm is {scale, bias}:
  stem/conv/{kernel [4, 4, C', C], bias}, stem/norm
  down<i>/norm [C'], down<i>/conv/{kernel [2, 2, C', C], bias}, i > 1
  stage<i>/block1/{conv/{kernel [7, 7, 1, C], bias}, norm, fc1/{kernel [C, 4 C], bias},
    fc2/{kernel [4 C, C], bias}, scale/vector [C]}; the others in a stack block[2:n + 1]
  norm of the mean over pixels, fc/{kernel [C, M], bias} of the classifier
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax.models import heads
from fedfr_jax.models.block_scan import Stage, with_remat
from fedfr_jax.models.layers import LayerSettings, same_conv
from fedfr_jax.models.linen import (
    Network,
    block_names,
    from_linen,
    normal,
    sow_features,
    stage_blocks,
)
from fedfr_jax.models.vit import ChannelScale, LayerNorm, gelu, linear
from fedfr_jax.ranges import Blocks, Count, Widths
from fedfr_jax.schema import checked
from fedfr_jax.types import Model

EPSILON = 1e-6  # added to a variance
SCALE = 1e-6  # first value of the factors


@checked
def convnext(
    input_shape: Sequence[int],
    *,
    num_classes: Count | None = None,
    blocks: Blocks = (3, 3, 9, 3),
    widths: Widths = (96, 192, 384, 768),
    dtype: Any = None,
    scan_blocks: bool = True,
    remat: bool = False,
) -> Model:
    """ConvNeXt, with the blocks and widths of ConvNeXt-T.

    Args:
      input_shape: (H, W, C); the stem divides H and W by 4, every further stage by 2.
      num_classes: M of a classifier; None ends in the normalized mean, D channels.
      blocks: of every stage.
      widths: channels of every stage.
    """
    counts = stage_blocks({}, 0, blocks, widths, minimum=1)
    if min(input_shape[:2]) < (least := 4 * 2 ** (len(widths) - 1)):
        raise ValueError(
            f"input_shape must have sides of at least {least} pixels for {len(widths)} "
            f"stages, got {tuple(input_shape)}."
        )

    def forward(network, x, train):  # [B, H, W, C] -> [B, D or M]
        param_dtype = x.dtype
        for i, (width, count) in enumerate(zip(widths, counts, strict=True), 1):
            if i == 1:
                x = Smaller(width, 4, dtype, norm_first=False, name="stem")(x)
            else:
                x = Smaller(width, 2, dtype, norm_first=True, name=f"down{i}")(x)
            first = functools.partial(with_remat(Block, remat), dtype)
            block = functools.partial(Block, dtype)
            stage = Stage(first, block, count - 1, scan_blocks, remat, name=f"stage{i}")
            x = stage(x, train)
        x = jnp.mean(x.astype(param_dtype), (1, 2))
        x = LayerNorm(EPSILON, name="norm")(x)
        if not num_classes:
            return x
        return heads.linear(num_classes, x.shape[-1], "fc")(sow_features(network, x))

    stages = {f"stage{i}": count for i, count in enumerate(counts, 1)}
    units = []
    for i, (stage, count) in enumerate(stages.items(), 1):
        units += ["stem" if i == 1 else f"down{i}", *block_names({stage: count})]
    units += ["norm", *["fc"] * bool(num_classes)]
    dim = num_classes or widths[-1]
    return from_linen(Network(forward), input_shape, dim, blocks=units, stages=stages)


class Smaller(nn.Module):
    """Convolution of patches that do not overlap, after or before a normalization."""

    width: int
    size: int
    dtype: Any
    norm_first: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, C'] -> [B, H / size, W / size, C], rounded down."""
        conv = nn.Conv(
            self.width,
            (self.size, self.size),
            self.size,
            padding="VALID",
            dtype=self.dtype,
            kernel_init=normal(0.02),
            name="conv",
        )
        norm = LayerNorm(EPSILON, name="norm")
        return conv(norm(x)) if self.norm_first else norm(conv(x))


class Block(nn.Module):
    """x + scale * linear(GELU(linear(norm(conv(x)))))."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> [B, H, W, C]."""
        del train
        width = x.shape[-1]
        conv = same_conv(
            width,
            LayerSettings(self.dtype),
            size=7,
            groups=width,
            use_bias=True,
            kernel_init=normal(0.02),
            name="conv",
        )
        y = LayerNorm(EPSILON, name="norm")(conv(x))
        y = linear(4 * width, "fc1", dtype=self.dtype)(y)
        y = linear(width, "fc2", dtype=self.dtype)(gelu(y))
        return x + ChannelScale(SCALE, name="scale")(y)
