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
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax.models.conv import Conv, Implementation
from fedfr_jax.models.heads import mean_logits
from fedfr_jax.models.linen import (
    block_names,
    from_linen,
    he_normal,
    stage_blocks,
    with_remat,
)
from fedfr_jax.models.norm import BatchNorm, GroupNorm
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
StemKind, Norm = Literal["cifar", "imagenet"], Literal["batch", "group"]


class Trunk(NamedTuple):
    """All but the last layer of a ResNet; see `resnet` for its settings."""

    blocks: tuple[int, ...]
    widths: tuple[int, ...]
    is_bottleneck: bool
    stem: str
    remat: bool
    last_stride: int = 2  # of the last stage, unless it is the only one

    @property
    def names(self) -> list[str]:
        """Path prefixes of its parameters, from input to output."""
        stages = {f"stage{i}": num for i, num in enumerate(self.blocks, 1)}
        return ["stem", *block_names(stages)]


def build_trunk(
    depth: int,
    blocks: Sequence[int] | None,
    widths: Sequence[int],
    stem: str,
    remat: bool,
) -> Trunk:
    """Trunk of a named depth, or with given numbers of blocks and widths."""
    blocks = stage_blocks(DEPTHS, depth, blocks, widths, minimum=1)
    return Trunk(blocks, tuple(widths), depth >= MIN_BOTTLENECK, stem, remat)


class LayerSettings(NamedTuple):
    """Settings shared by all layers; see `resnet`."""

    norm: str = "batch"
    norm_groups: int = 32
    conv_implementation: str = "auto"
    dtype: Any = None


class Convolution(NamedTuple):
    """Sizes of one convolution in a block."""

    features: int
    size: int = 3
    stride: int = 1


def basic(width: int, stride: int) -> tuple[Convolution, ...]:
    """The two convolutions of a basic block."""
    return Convolution(width, stride=stride), Convolution(width)


def bottleneck(width: int, stride: int) -> tuple[Convolution, ...]:
    """The three convolutions of a bottleneck."""
    return (
        Convolution(width, size=1),
        Convolution(width, stride=stride),
        Convolution(EXPANSION * width, size=1),
    )


def stage_maps(
    trunk: Trunk, settings: LayerSettings, x: jax.Array, train: bool
) -> list[jax.Array]:
    """Apply the stages to images [B, H, W, C]; return the output [B, h, w, C'] of each.

    For the call of a module, which then has the trunk's parameters.
    """
    layers = bottleneck if trunk.is_bottleneck else basic
    block = with_remat(Block) if trunk.remat else Block
    x = Stem(trunk.widths[0], trunk.stem, settings, name="stem")(x, train)
    maps = []
    for i, (width, num) in enumerate(zip(trunk.widths, trunk.blocks, strict=True)):
        first_stride = 1 if i == 0 else 2
        if 0 < i == len(trunk.blocks) - 1:
            first_stride = trunk.last_stride
        strides = [first_stride] + [1] * (num - 1)
        convolutions = tuple(layers(width, stride) for stride in strides)
        stage = Stage(block, convolutions, settings, name=f"stage{i + 1}")
        x = stage(x, train)
        maps.append(x)
    return maps


class Stem(nn.Module):
    """Stem: convolution, normalization, ReLU; stride and pooling for "imagenet"."""

    width: int
    kind: str  # a StemKind
    settings: LayerSettings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> [B, H, W, width], or a quarter of H and W, rounded up."""
        is_large = self.kind == "imagenet"
        conv = Convolution(self.width, 7, 2) if is_large else Convolution(self.width)
        x = build_conv(conv, self.settings, "conv")(x)
        x = nn.relu(build_norm(self.settings)(x, train))
        return _max_pool(x) if is_large else x


class Stage(nn.Module):
    """Blocks applied one after another."""

    block: type[nn.Module]
    convolutions: tuple[tuple[Convolution, ...], ...]  # of every block
    settings: LayerSettings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, C], rounded up."""
        for j, convolutions in enumerate(self.convolutions):
            block = self.block(convolutions, self.settings, name=f"block{j + 1}")
            x = block(x, train)
        return x


class Block(nn.Module):
    """ReLU(shortcut(x) + norm(conv(... ReLU(norm(conv(x)))))))."""

    convolutions: tuple[Convolution, ...]
    settings: LayerSettings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, C], rounded up."""
        y = x
        for i, conv in enumerate(self.convolutions):
            y = nn.relu(y) if i else y
            y = build_conv(conv, self.settings, f"conv{i + 1}")(y)
            y = build_norm(self.settings, i + 1)(y, train)
        stride = max(conv.stride for conv in self.convolutions)
        if stride > 1 or x.shape[-1] != y.shape[-1]:
            shape = Convolution(y.shape[-1], 1, stride)
            x = Shortcut(shape, self.settings, name="shortcut")(x, train)
        return nn.relu(x + y)


class Shortcut(nn.Module):
    """1x1 convolution, normalization."""

    convolution: Convolution
    settings: LayerSettings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, C], rounded up."""
        x = build_conv(self.convolution, self.settings, "conv")(x)
        return build_norm(self.settings)(x, train)


def build_conv(convolution: Convolution, settings: LayerSettings, name: str) -> Conv:
    """Convolution with 'same' padding: only the stride makes the image smaller."""
    return Conv(
        convolution.features,
        kernel_size=convolution.size,
        stride=convolution.stride,
        padding=convolution.size // 2,
        kernel_init=he_normal(),
        settings=settings,
        name=name,
    )


def build_norm(settings: LayerSettings, number: int | str = "") -> nn.Module:
    """Batch normalization "bn<number>" or group normalization "gn<number>"."""
    if settings.norm == "group":
        return GroupNorm(settings.norm_groups, name=f"gn{number}")
    return BatchNorm(name=f"bn{number}")


def _max_pool(x):
    """3x3 max pooling at stride 2, [B, H, W, C] -> [B, ceil(H / 2), ceil(W / 2), C].

    The largest of slices, rows first: the backward pass of reduce_window adds up in no
    fixed order on a GPU. Zeros around x change nothing, as x comes from a ReLU.
    """
    height, width = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows = [x[:, i : i + height : 2] for i in range(3)]
    x = functools.reduce(jnp.maximum, rows)
    columns = [x[:, :, i : i + width : 2] for i in range(3)]
    return functools.reduce(jnp.maximum, columns)


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
    conv_implementation: Implementation = "auto",
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
    trunk = build_trunk(depth, blocks, widths, stem, remat)
    settings = LayerSettings(norm, norm_groups, conv_implementation, dtype)
    module = ResNet(trunk, num_classes, settings)
    blocks = [*trunk.names, "fc"]
    return from_linen(module, input_shape, num_classes, blocks=blocks)


class ResNet(nn.Module):
    """Flax module; see `resnet` for its attributes."""

    trunk: Trunk
    num_classes: int
    settings: LayerSettings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> logits [B, M]."""
        maps = stage_maps(self.trunk, self.settings, x, train)
        return mean_logits(self, maps[-1], x.dtype)
