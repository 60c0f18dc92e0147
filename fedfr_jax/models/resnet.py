"""ResNet: residual networks for classification, and the trunk that others use.

The trunk is all but the last layer: a stem, and stages of residual blocks.

He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385, table 1,
with basic blocks (18, 34 layers) or bottlenecks (50 and more). As in torchvision, the
stride of a bottleneck is on its 3x3 convolution ("v1.5"), shortcuts that change shape
are 1x1 convolutions, and convolutions start as He normal of the fan-out. Deviation: the
"cifar" stem, one 3x3 convolution without pooling, is that of the paper's section 4.2,
in front of any stages.

Parameters, C = width of the stage; every bn (gn with group normalization) is {scale,
bias} [C], a bn with batch_stats {mean, var} [C] at the same path:
  stem/conv/kernel [3, 3, C', C] or [7, 7, C', C], stem/bn
  stage<i>/block<j>/conv<1|2>/kernel [3, 3, C', C], bn<1|2>, or as bottleneck
    conv1/kernel [1, 1, C', C], conv2/kernel [3, 3, C, C], conv3/kernel [1, 1, C, 4 C],
    bn<1|2|3>
  stage<i>/block1/shortcut/{conv/kernel [1, 1, C', C or 4 C], bn} where shapes differ
  fc/kernel [C, M], bias [M] of the classifier, C = channels of the last stage
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax.models.block_scan import with_remat
from fedfr_jax.models.heads import mean_logits
from fedfr_jax.models.layers import (
    ConvNorm,
    LayerSettings,
    Norm,
    build_norm,
    same_conv,
)
from fedfr_jax.models.linen import Network, block_names, from_linen, stage_blocks
from fedfr_jax.ranges import Blocks, Count, Depth, Width, Widths
from fedfr_jax.schema import checked
from fedfr_jax.types import Model

DEPTHS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
MIN_BOTTLENECK = 50  # depth from which blocks are bottlenecks
EXPANSION = 4  # of a bottleneck's width to its output channels
StemKind = Literal["cifar", "imagenet"]


class Trunk(NamedTuple):
    """All but the last layer of a network for classification."""

    # (settings, x [B, H, W, C], train) -> maps of [B, h, w, C'], of decreasing size,
    # within the call of a network
    maps: Callable[[LayerSettings, jax.Array, bool], list[jax.Array]]
    num_maps: int
    names: tuple[str, ...]  # path prefixes of its parameters, from input to output


def resnet_trunk(
    depth: int,
    blocks: Sequence[int] | None,
    widths: Sequence[int],
    stem: str,
    remat: bool,
    last_stride: int = 2,
) -> Trunk:
    """Stem and stages of a ResNet, of which each gives a map; see `resnet`.

    Args:
      last_stride: of the last stage, unless it is the only one.
    """
    counts = stage_blocks(DEPTHS, depth, blocks, widths, minimum=1)
    strides = [1, *[2] * (len(counts) - 2), last_stride][: len(counts)]
    block = functools.partial(
        with_remat(Block, remat), is_bottleneck=depth >= MIN_BOTTLENECK
    )

    def maps(settings, x, train):
        unit = functools.partial(ConvNorm, activation="relu", name="stem")
        if stem == "imagenet":
            x = unit(widths[0], settings, size=7, stride=2)(x, train)
            # Zeros change no maximum, as x comes from a ReLU.
            x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
            x = nn.max_pool(x, (3, 3), (2, 2))
        else:
            x = unit(widths[0], settings)(x, train)
        found = []
        sizes = zip(widths, counts, strides, strict=True)
        for i, (width, count, stride) in enumerate(sizes, 1):
            stage = Stage(block, width, count, stride, settings, name=f"stage{i}")
            x = stage(x, train)
            found.append(x)
        return found

    stages = {f"stage{i}": count for i, count in enumerate(counts, 1)}
    return Trunk(maps, len(counts), ("stem", *block_names(stages)))


class Stage(nn.Module):
    """Blocks applied one after another."""

    block: Callable[..., nn.Module]  # of `Block`'s arguments
    width: int
    num_blocks: int
    stride: int  # of the first block
    settings: LayerSettings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, C], rounded up."""
        for j in range(self.num_blocks):
            stride = 1 if j else self.stride
            block = self.block(self.width, self.settings, stride, name=f"block{j + 1}")
            x = block(x, train)
        return x


class Block(nn.Module):
    """ReLU(shortcut(x) + norm(conv(... ReLU(norm(conv(x)))))))."""

    width: int
    settings: LayerSettings
    stride: int = 1
    is_bottleneck: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, C], rounded up."""
        width, stride = self.width, self.stride
        sizes = [(width, 3, stride), (width, 3, 1)]  # channels, size, stride
        if self.is_bottleneck:
            sizes = [(width, 1, 1), (width, 3, stride), (EXPANSION * width, 1, 1)]
        y = x
        for i, (features, size, step) in enumerate(sizes, 1):
            y = nn.relu(y) if i > 1 else y
            conv = same_conv(
                features, self.settings, size=size, stride=step, name=f"conv{i}"
            )
            y = build_norm(self.settings, i)(conv(y), train)
        if stride > 1 or x.shape[-1] != y.shape[-1]:
            unit = functools.partial(ConvNorm, size=1, stride=stride, name="shortcut")
            x = unit(y.shape[-1], self.settings)(x, train)
        return nn.relu(x + y)


@checked
def resnet(
    input_shape: Sequence[int],
    *,
    num_classes: Count,
    depth: Depth = 18,
    blocks: Blocks | None = None,
    widths: Widths = (64, 128, 256, 512),
    stem: StemKind = "cifar",
    norm: Norm = "batch",
    norm_groups: Width = 32,
    dtype: Any = None,
    remat: bool = False,
) -> Model:
    """ResNet classifier of a named depth, or with given numbers of blocks and widths.

    Args:
      input_shape: (H, W, C); every stage but the first halves H and W, rounding up.
      depth: a key of DEPTHS; with `blocks`, bottlenecks from 50 on.
      blocks: residual blocks of every stage, instead of those of `depth`.
      widths: channels of every stage; a bottleneck ends in four times as many.
      stem: "cifar", a 3x3 convolution, or "imagenet", 7x7 at stride 2 and max pooling.
      norm: "batch" or "group", whose groups must divide all widths.
      norm_groups: of group normalization.
    """
    trunk = resnet_trunk(depth, blocks, widths, stem, remat)
    settings = LayerSettings(dtype, norm, norm_groups)

    def forward(network, x, train):  # [B, H, W, C] -> logits [B, M]
        maps = trunk.maps(settings, x, train)
        return mean_logits(network, maps[-1], num_classes, x.dtype)

    network, units = Network(forward), [*trunk.names, "fc"]
    return from_linen(network, input_shape, num_classes, blocks=units)
