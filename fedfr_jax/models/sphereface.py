"""SphereFace: plain residual convolutions without batch normalization.

Liu et al., "SphereFace: Deep Hypersphere Embedding for Face Recognition",
arXiv:1704.08063, table 2; in the form FedFR trains (64 layers, identity shortcuts).
A stage is a strided 3x3 convolution with PReLU, then n blocks
x + PReLU(conv(PReLU(conv(x)))); after the last stage one linear layer.

Parameters, C = width of the stage, n = its number of blocks:
  stage<i>/block1/conv/kernel [3, 3, C', C], bias [C], block1/prelu/slope [C]: the
    strided convolution
  stage<i>/block<j>/conv<1|2>/kernel [3, 3, C, C], prelu<1|2>/slope [C], j = 2 to n + 1,
    in a stack block[2:n + 2] of leaves [n, ...], see `scanned_blocks`
  fc/kernel [h w C, D] with h, w, C in this order, bias [D]
"""

from collections.abc import Sequence
from typing import Any

import jax
from flax import linen as nn

from fedfr_jax.models.block_scan import run_stack
from fedfr_jax.models.conv import Conv, ConvSettings, Implementation
from fedfr_jax.models.linen import (
    block_names,
    from_linen,
    normal,
    stage_blocks,
    with_remat,
    xavier_uniform,
)
from fedfr_jax.models.norm import PReLU
from fedfr_jax.ranges import Blocks, Depth, Width, Widths
from fedfr_jax.schema import checked
from fedfr_jax.types import Model

DEPTHS = {20: (1, 2, 4, 1), 64: (3, 7, 16, 3)}


@checked
def sphereface(
    input_shape: Sequence[int],
    *,
    depth: Depth = 64,
    blocks: Blocks | None = None,
    widths: Widths = (64, 128, 256, 512),
    embedding_dim: Width = 512,
    conv_implementation: Implementation = "auto",
    dtype: Any = None,
    scan_blocks: bool = True,
    remat: bool = False,
) -> Model:
    """SphereFace-20 or -64, or with given numbers of blocks and widths.

    Args:
      input_shape: (H, W, C); every stage halves H and W, rounding up.
      depth: a key of DEPTHS.
      blocks: residual blocks of every stage, instead of `depth`.
      widths: channels of every stage.
    """
    module = SphereFace(
        blocks=stage_blocks(DEPTHS, depth, blocks, widths, minimum=0),
        widths=tuple(widths),
        embedding_dim=embedding_dim,
        settings=ConvSettings(conv_implementation, dtype),
        scan_blocks=scan_blocks,
        remat=remat,
    )
    stages = {f"stage{i}": 1 + num for i, num in enumerate(module.blocks, 1)}
    units = [*block_names(stages), "fc"]
    return from_linen(module, input_shape, embedding_dim, blocks=units, stages=stages)


class SphereFace(nn.Module):
    """Flax module; see `sphereface` for its attributes."""

    blocks: tuple[int, ...]
    widths: tuple[int, ...]
    embedding_dim: int
    settings: ConvSettings = ConvSettings()
    scan_blocks: bool = True
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> [B, D]."""
        param_dtype = x.dtype
        for i, (width, num) in enumerate(zip(self.widths, self.blocks, strict=True), 1):
            stage = Stage(
                width,
                num,
                self.scan_blocks,
                self.remat,
                self.settings,
                name=f"stage{i}",
            )
            x = stage(x, train)
        x = x.reshape(x.shape[0], -1).astype(param_dtype)
        fc = nn.Dense(self.embedding_dim, kernel_init=xavier_uniform(), name="fc")
        return fc(x)


class Stage(nn.Module):
    """A strided convolution, then equal residual blocks."""

    width: int
    num_blocks: int
    scan_blocks: bool
    remat: bool
    settings: ConvSettings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, ceil(H / 2), ceil(W / 2), width]."""
        first, block = First, Block
        if self.remat:
            first, block = with_remat(First), with_remat(Block)
        x = first(self.width, self.settings, name="first")(x, train)
        if not self.num_blocks:
            return x
        stack = block(self.width, self.settings, name="blocks")
        return run_stack(stack, x, train, length=self.num_blocks, scan=self.scan_blocks)


class First(nn.Module):
    """Strided convolution with PReLU, the first layer of a stage."""

    width: int
    settings: ConvSettings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, ceil(H / 2), ceil(W / 2), width]."""
        del train
        conv = Conv(
            self.width,
            stride=2,
            padding=1,
            use_bias=True,
            settings=self.settings,
            name="conv",
        )
        return PReLU(name="prelu")(conv(x))


class Block(nn.Module):
    """x + PReLU(conv(PReLU(conv(x))))."""

    width: int
    settings: ConvSettings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, width] -> [B, H, W, width]."""
        del train
        y = x
        for i in ("1", "2"):
            conv = Conv(
                self.width,
                padding=1,
                kernel_init=normal(0.01),
                settings=self.settings,
                name=f"conv{i}",
            )
            y = PReLU(name=f"prelu{i}")(conv(y))
        return x + y
