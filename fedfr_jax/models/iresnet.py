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

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
from flax import linen as nn

from fedfr_jax.models.block_scan import (
    Remat,
    Stage,
    check_remat,
    saved_names,
    with_remat,
)
from fedfr_jax.models.heads import HEADS, check_head, embed
from fedfr_jax.models.layers import ConvNorm, LayerSettings, same_conv
from fedfr_jax.models.linen import (
    Network,
    block_names,
    from_linen,
    normal,
    stage_blocks,
)
from fedfr_jax.models.norm import BatchNorm, PReLU
from fedfr_jax.ranges import BelowOne, Blocks, Depth, Width, Widths
from fedfr_jax.schema import checked
from fedfr_jax.types import Model

INIT = normal(0.1)  # of convolutions
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
    counts = stage_blocks(DEPTHS, depth, blocks, widths, minimum=1)
    strides = (2, 1) if stride_on == "first" else (1, 2)
    settings, is_pooled = LayerSettings(dtype), shortcut == "pool"

    def forward(network, x, train):  # [B, H, W, C] -> [B, D]
        param_dtype = x.dtype
        stem = ConvNorm(
            widths[0], settings, activation="prelu", kernel_init=INIT, name="stem"
        )
        x = stem(x, train)
        for i, (width, count) in enumerate(zip(widths, counts, strict=True), 1):
            block = functools.partial(Block, width, settings, is_pooled)
            first = functools.partial(
                with_remat(Block, remat), width, settings, is_pooled, strides
            )
            stage = Stage(first, block, count - 1, scan_blocks, remat, name=f"stage{i}")
            x = stage(x, train)
        x = x.astype(param_dtype)
        return embed(network, x, train, head, embedding_dim, dropout)

    stages = {f"stage{i}": count for i, count in enumerate(counts, 1)}
    units = ["stem", *block_names(stages), *HEADS[head]]
    network = Network(forward)
    return from_linen(network, input_shape, embedding_dim, blocks=units, stages=stages)


class Block(nn.Module):
    """shortcut(x) + BN(conv(PReLU(BN(conv(BN(x))))))."""

    width: int
    settings: LayerSettings
    is_pooled: bool = False  # the shortcut, where the number of channels stays
    strides: tuple[int, int] = (1, 1)  # of the two convolutions

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, width], rounded up."""
        conv1, conv2 = (
            same_conv(
                self.width,
                self.settings,
                stride=stride,
                kernel_init=INIT,
                name=f"conv{i}",
            )
            for i, stride in enumerate(self.strides, 1)
        )
        y = saved_names(conv1(BatchNorm(name="bn1")(x, train)))
        y = PReLU(name="prelu")(BatchNorm(name="bn2")(y, train))
        y = BatchNorm(name="bn3")(saved_names(conv2(y)), train)
        stride, is_narrower = max(self.strides), x.shape[-1] != self.width
        if stride > 1 and self.is_pooled and not is_narrower:
            x = x[:, ::stride, ::stride]
        elif stride > 1 or is_narrower:
            shortcut = ConvNorm(
                self.width,
                self.settings,
                size=1,
                stride=stride,
                kernel_init=INIT,
                name="shortcut",
            )
            x = shortcut(x, train)
        return x + y
