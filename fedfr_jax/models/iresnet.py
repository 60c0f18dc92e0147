"""IResNet: the residual network of face recognition, BN-conv-BN-PReLU-conv-BN blocks.

Deng et al., "ArcFace", arXiv:1801.07698, section 3.1; Duta et al., arXiv:2004.04989; An
et al., "BigFace", the masked face recognition challenge of ICCV 2021. No activation
follows the sum, and every stage, the first one too, starts with a block of stride 2
whose shortcut is a 1x1 convolution with BN.

Parameters, C = width of the stage, n = its number of blocks; every bn is {scale, bias}
[C], with batch_stats {mean, var} [C] at the same path:
  stem/conv/kernel [3, 3, C', C], stem/bn, stem/prelu/slope [C]
  stage<i>/block1/{bn1, bn2, bn3}, conv<1|2>/kernel [3, 3, C', C], prelu/slope [C],
    shortcut/conv/kernel [1, 1, C', C], shortcut/bn
  stage<i>/block<j>/... the same without shortcut, j = 2 to n, in a stack block[2:n + 1]
    of leaves [n - 1, ...], see `scanned_blocks`
  those of the head, see `heads`; of "E" bn, fc/kernel [h w C, D] with h, w, C in
    this order, fc/bias [D], bn_out (its scale is frozen at 1: bias only)
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
from flax import linen as nn

from fedfr_jax.models.block_scan import run_stack
from fedfr_jax.models.conv import Conv, Implementation
from fedfr_jax.models.heads import HEADS, check_head, embed
from fedfr_jax.models.linen import (
    Remat,
    block_names,
    check_remat,
    from_linen,
    normal,
    rematerialization,
    saved_names,
    stage_blocks,
    with_remat,
)
from fedfr_jax.models.norm import BatchNorm, PReLU
from fedfr_jax.ranges import BelowOne, Blocks, Depth, Width, Widths
from fedfr_jax.schema import checked
from fedfr_jax.types import Model

DEPTHS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 14, 3),
    100: (3, 13, 30, 3),
    120: (3, 13, 40, 3),
    124: (3, 13, 40, 5),
    134: (3, 10, 50, 3),
    136: (3, 13, 48, 3),
    140: (3, 15, 48, 3),
    160: (3, 24, 49, 3),
    200: (6, 26, 60, 6),
    240: (3, 25, 88, 3),
    600: (3, 70, 220, 3),
    1200: (3, 80, 512, 3),
    2060: (3, 128, 896, 3),
}


class LayerSettings(NamedTuple):
    """Settings shared by all layers; see `iresnet`."""

    conv_implementation: str = "auto"
    dtype: Any = None
    shortcut: str = "conv"


@checked
def iresnet(
    input_shape: Sequence[int],
    *,
    depth: Depth = 50,
    blocks: Blocks | None = None,
    widths: Widths = (64, 128, 256, 512),
    embedding_dim: Width = 512,
    dropout: BelowOne = 0.0,
    stride_on: Literal["first", "second"] = "second",
    shortcut: Literal["conv", "pool"] = "conv",
    head: Literal["E", "F", "GAP", "GDC", "moe"] = "E",
    conv_implementation: Implementation = "auto",
    dtype: Any = None,
    scan_blocks: bool = True,
    remat: Remat = False,
) -> Model:
    """IResNet of a named depth, or with given numbers of blocks and widths.

    Args:
      input_shape: (H, W, C); every stage halves H and W, rounding up.
      depth: a key of DEPTHS.
      blocks: residual blocks of every stage, instead of `depth`.
      widths: channels of every stage; the stem has those of the first.
      dropout: share of the linear layer's inputs that training sets to 0, in [0, 1);
        above 0, training needs `apply`'s key.
      stride_on: "second" (ArcFace) or "first" (BigFace): which convolution of a
        stage's first block has stride 2.
      shortcut: "conv", or "pool" (face.evoLVe's and TFace's IR): blocks that keep the
        channels drop every second pixel instead, without parameters.
      head: a name of `heads.HEADS`: E, F, GAP, GDC, or moe, the two experts of
        BigFace's first round, whose `Model.features` are the gate's logits [B, 2].
      dtype: of the convolutions, such as "bfloat16"; None for the dtype of the
        parameters. Statistics, the linear layer and the last BN always compute in at
        least float32.
      remat: training keeps the input of every block only, and computes the rest again;
        "convolutions" keeps what they give too, "offload" keeps it in the memory of the
        host.
    """
    check_head(head, dropout)
    check_remat(remat)
    module = IResNet(
        blocks=stage_blocks(DEPTHS, depth, blocks, widths, minimum=1),
        widths=tuple(widths),
        embedding_dim=embedding_dim,
        settings=LayerSettings(conv_implementation, dtype, shortcut),
        dropout=dropout,
        stride_on=stride_on,
        head=head,
        scan_blocks=scan_blocks,
        remat=remat,
    )
    stages = {f"stage{i}": num for i, num in enumerate(module.blocks, 1)}
    units = ["stem", *block_names(stages), *HEADS[head]]
    return from_linen(module, input_shape, embedding_dim, blocks=units, stages=stages)


class IResNet(nn.Module):
    """Flax module; see `iresnet` for its attributes."""

    blocks: tuple[int, ...]
    widths: tuple[int, ...]
    embedding_dim: int
    settings: LayerSettings = LayerSettings()
    dropout: float = 0.0
    stride_on: str = "second"
    head: str = "E"
    scan_blocks: bool = True
    remat: bool | str = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> [B, D]."""
        param_dtype, settings = x.dtype, self.settings
        x = Stem(self.widths[0], settings, name="stem")(x, train)
        for i, (width, num) in enumerate(zip(self.widths, self.blocks, strict=True)):
            stage = Stage(
                width,
                num,
                scan_blocks=self.scan_blocks,
                remat=self.remat,
                stride_on=self.stride_on,
                settings=settings,
                name=f"stage{i + 1}",
            )
            x = stage(x, train)
        return embed(self, x.astype(param_dtype), train)


class Stem(nn.Module):
    """Convolution of stride 1, BN, PReLU."""

    width: int
    settings: LayerSettings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> [B, H, W, width]."""
        x = _conv(self.width, self.settings, name="conv")(x)
        return PReLU(name="prelu")(BatchNorm(name="bn")(x, train))


class Stage(nn.Module):
    """A block of stride 2, then equal blocks of stride 1."""

    width: int
    num_blocks: int
    scan_blocks: bool
    remat: bool | str
    stride_on: str
    settings: LayerSettings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, ceil(H / 2), ceil(W / 2), width]."""
        strides = (2, 1) if self.stride_on == "first" else (1, 2)
        block = with_remat(Block, self.remat) if self.remat else Block
        x = block(self.width, self.settings, strides, name="first")(x, train)
        if self.num_blocks == 1:
            return x
        return run_stack(
            Block(self.width, self.settings, name="blocks"),
            x,
            train,
            length=self.num_blocks - 1,
            scan=self.scan_blocks,
            remat=rematerialization(self.remat),
        )


class Block(nn.Module):
    """shortcut(x) + BN(conv(PReLU(BN(conv(BN(x))))))."""

    width: int
    settings: LayerSettings
    strides: tuple[int, int] = (1, 1)  # of the two convolutions

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, width], rounded up."""
        width, settings = self.width, self.settings
        y = BatchNorm(name="bn1")(x, train)
        y = saved_names(_conv(width, settings, stride=self.strides[0], name="conv1")(y))
        y = PReLU(name="prelu")(BatchNorm(name="bn2")(y, train))
        y = saved_names(_conv(width, settings, stride=self.strides[1], name="conv2")(y))
        y = BatchNorm(name="bn3")(y, train)
        stride = max(self.strides)
        is_pooled = settings.shortcut == "pool" and x.shape[-1] == width
        if stride > 1 and is_pooled:
            x = x[:, ::stride, ::stride]
        elif stride > 1 or x.shape[-1] != width:
            x = Shortcut(width, settings, stride, name="shortcut")(x, train)
        return x + y


class Shortcut(nn.Module):
    """1x1 convolution, BN."""

    width: int
    settings: LayerSettings
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
        settings=settings,
        name=name,
    )
