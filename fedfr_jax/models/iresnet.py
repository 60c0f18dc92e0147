"""IResNet: the residual network of face recognition, BN-conv-BN-PReLU-conv-BN blocks.

Deng et al., "ArcFace", arXiv:1801.07698, section 3.1 (the "E" head of BN, linear, BN);
Duta et al., arXiv:2004.04989. No activation follows the sum, and every stage, the first
one too, starts with a block of stride 2 whose shortcut is a 1x1 convolution with BN.

Parameters, C = width of the stage, n = its number of blocks; every bn is {scale, bias}
[C], with batch_stats {mean, var} [C] at the same path:
  stem/conv/kernel [3, 3, C', C], stem/bn, stem/prelu/slope [C]
  stage<i>/block1/{bn1, bn2, bn3}, conv<1|2>/kernel [3, 3, C', C], prelu/slope [C],
    shortcut/conv/kernel [1, 1, C', C], shortcut/bn
  stage<i>/block<j>/... the same without shortcut, j = 2 to n, in a stack block[2:n + 1]
    of leaves [n - 1, ...], see `stacks`
  bn, fc/kernel [h w C, D] with h, w, C in this order, fc/bias [D],
  bn_out (its scale is frozen at 1: bias only)
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from flax import linen as nn

from fedfr_jax.models.conv import Conv
from fedfr_jax.models.initial import normal, uniform
from fedfr_jax.models.linen import (
    block_names,
    from_linen,
    rematerialised,
    stage_blocks,
)
from fedfr_jax.models.norm import BatchNorm, PReLU
from fedfr_jax.models.stack import run_stack
from fedfr_jax.types import Model

DEPTHS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 14, 3),
    100: (3, 13, 30, 3),
    120: (3, 13, 40, 3),
    140: (3, 15, 48, 3),
    200: (6, 26, 60, 6),
    240: (3, 25, 88, 3),
    600: (3, 70, 220, 3),
    1200: (3, 80, 512, 3),
    2060: (3, 128, 896, 3),
}


def iresnet(
    image_shape: Sequence[int],
    *,
    depth: int = 50,
    blocks: Sequence[int] | None = None,
    widths: Sequence[int] = (64, 128, 256, 512),
    embedding_dim: int = 512,
    dropout: float = 0.0,
    stride_on: str = "second",
    lowering: str = "auto",
    dtype: Any = None,
    scan: bool = True,
    remat: bool = False,
) -> Model:
    """IResNet of a known depth, or of any numbers of blocks and widths.

    Args:
      image_shape: (H, W, C); every stage halves H and W, rounding up.
      depth: a key of DEPTHS.
      blocks: residual blocks of every stage, instead of `depth`.
      widths: channels of every stage; the stem has those of the first.
      embedding_dim: D.
      dropout: share of the linear layer's inputs that training sets to 0, in [0, 1);
        above 0, training needs `apply`'s key.
      stride_on: "second" (ArcFace) or "first" (BigFace): which convolution of a
        stage's first block has stride 2.
      lowering: how convolutions are computed, see `conv.convolve`.
      dtype: of the convolutions, such as "bfloat16"; None for the dtype of the
        parameters. Statistics, the linear layer and the last BN always compute in at
        least float32.
      scan: run stacks of equal blocks by a scan; False unrolls them.
      remat: training keeps the input of every block only, and computes it again.

    Raises:
      ValueError: for an unknown depth or stride_on, blocks that do not fit the widths,
        or a dropout outside [0, 1).
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}.")
    if stride_on not in ("first", "second"):
        raise ValueError(f"stride_on must be first or second, got {stride_on!r}.")
    module = IResNet(
        blocks=stage_blocks(DEPTHS, depth, blocks, widths, minimum=1),
        widths=tuple(widths),
        embedding_dim=embedding_dim,
        dropout=dropout,
        stride_on=stride_on,
        lowering=lowering,
        dtype=dtype,
        scan=scan,
        remat=remat,
    )
    stages = {f"stage{i}": num for i, num in enumerate(module.blocks, 1)}
    units = ["stem", *block_names(stages), "bn", "fc", "bn_out"]
    return from_linen(module, image_shape, embedding_dim, blocks=units, stages=stages)


class IResNet(nn.Module):
    """The network; `iresnet` documents its attributes."""

    blocks: tuple[int, ...]
    widths: tuple[int, ...]
    embedding_dim: int
    dropout: float = 0.0
    stride_on: str = "second"
    lowering: str = "auto"
    dtype: Any = None
    scan: bool = True
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> [B, D]."""
        param_dtype = x.dtype
        settings = {"lowering": self.lowering, "dtype": self.dtype}
        x = Stem(self.widths[0], settings, name="stem")(x, train)
        for i, (width, num) in enumerate(zip(self.widths, self.blocks, strict=True)):
            stage = Stage(
                width,
                num,
                scan=self.scan,
                remat=self.remat,
                stride_on=self.stride_on,
                settings=settings,
                name=f"stage{i + 1}",
            )
            x = stage(x, train)
        x = BatchNorm(name="bn")(x, train)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        x = x.reshape(x.shape[0], -1).astype(param_dtype)
        init = uniform(1 / math.sqrt(x.shape[-1]))
        x = nn.Dense(self.embedding_dim, kernel_init=init, bias_init=init, name="fc")(x)
        return BatchNorm(use_scale=False, name="bn_out")(x, train)


class Stem(nn.Module):
    """Convolution of stride 1, BN, PReLU."""

    width: int
    settings: dict[str, Any]

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> [B, H, W, width]."""
        x = _conv(self.width, self.settings, name="conv")(x)
        return PReLU(name="prelu")(BatchNorm(name="bn")(x, train))


class Stage(nn.Module):
    """A block of stride 2, then equal blocks of stride 1."""

    width: int
    num_blocks: int
    scan: bool
    remat: bool
    stride_on: str
    settings: dict[str, Any]

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, ceil(H / 2), ceil(W / 2), width]."""
        strides = (2, 1) if self.stride_on == "first" else (1, 2)
        block = rematerialised(Block) if self.remat else Block
        x = block(self.width, self.settings, strides, name="first")(x, train)
        if self.num_blocks == 1:
            return x
        stack = block(self.width, self.settings, name="blocks")
        return run_stack(stack, x, train, length=self.num_blocks - 1, scan=self.scan)


class Block(nn.Module):
    """shortcut(x) + BN(conv(PReLU(BN(conv(BN(x))))))."""

    width: int
    settings: dict[str, Any]
    strides: tuple[int, int] = (1, 1)  # of the two convolutions

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, width], rounded up."""
        width, settings = self.width, self.settings
        y = BatchNorm(name="bn1")(x, train)
        y = _conv(width, settings, stride=self.strides[0], name="conv1")(y)
        y = PReLU(name="prelu")(BatchNorm(name="bn2")(y, train))
        y = _conv(width, settings, stride=self.strides[1], name="conv2")(y)
        y = BatchNorm(name="bn3")(y, train)
        if max(self.strides) > 1 or x.shape[-1] != width:
            stride = max(self.strides)
            x = Shortcut(width, settings, stride, name="shortcut")(x, train)
        return x + y


class Shortcut(nn.Module):
    """1x1 convolution, BN."""

    width: int
    settings: dict[str, Any]
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, width], rounded up."""
        x = _conv(self.width, self.settings, size=1, stride=self.stride, name="conv")(x)
        return BatchNorm(name="bn")(x, train)


def _conv(width, settings, *, name, size=3, stride=1):
    return Conv(
        width,
        kernel_size=size,
        stride=stride,
        padding=size // 2,
        kernel_init=normal(0.1),
        name=name,
        **settings,
    )
