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

import functools
from collections.abc import Sequence
from typing import Any

import jax
from flax import linen as nn

from fedfr_jax.models.block_scan import Stage, with_remat
from fedfr_jax.models.layers import LayerSettings, same_conv
from fedfr_jax.models.linen import (
    Network,
    block_names,
    from_linen,
    normal,
    stage_blocks,
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
    counts = stage_blocks(DEPTHS, depth, blocks, widths, minimum=0)
    settings = LayerSettings(dtype)

    def forward(network, x, train):  # [B, H, W, C] -> [B, D]
        param_dtype = x.dtype
        for i, (width, count) in enumerate(zip(widths, counts, strict=True), 1):
            first = functools.partial(with_remat(First, remat), width, settings)
            block = functools.partial(Block, width, settings)
            stage = Stage(first, block, count, scan_blocks, remat, name=f"stage{i}")
            x = stage(x, train)
        x = x.reshape(x.shape[0], -1).astype(param_dtype)
        return nn.Dense(embedding_dim, kernel_init=xavier_uniform(), name="fc")(x)

    stages = {f"stage{i}": 1 + count for i, count in enumerate(counts, 1)}
    units = [*block_names(stages), "fc"]
    network = Network(forward)
    return from_linen(network, input_shape, embedding_dim, blocks=units, stages=stages)


class First(nn.Module):
    """Strided convolution with PReLU, the first layer of a stage."""

    width: int
    settings: LayerSettings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, ceil(H / 2), ceil(W / 2), width]."""
        del train
        conv = same_conv(
            self.width,
            self.settings,
            stride=2,
            use_bias=True,
            kernel_init=xavier_uniform(),
            name="conv",
        )
        return PReLU(name="prelu")(conv(x))


class Block(nn.Module):
    """x + PReLU(conv(PReLU(conv(x))))."""

    width: int
    settings: LayerSettings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, width] -> [B, H, W, width]."""
        del train
        y = x
        for i in ("1", "2"):
            init = normal(0.01)
            conv = same_conv(
                self.width, self.settings, kernel_init=init, name=f"conv{i}"
            )
            y = PReLU(name=f"prelu{i}")(conv(y))
        return x + y
