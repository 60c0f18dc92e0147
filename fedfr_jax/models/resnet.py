"""ResNet: residual blocks of convolutions, for classification.

He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385, table 1,
with basic blocks (18, 34 layers) or bottlenecks (50 and more). As in torchvision, the
stride of a bottleneck is on its 3x3 convolution ("v1.5"), shortcuts that change shape
are 1x1 convolutions, and convolutions start as He normal of the fan-out. Deviation: the
"cifar" stem, one 3x3 convolution without pooling, is that of the paper's section 4.2,
in front of any stages.

Parameters, C = width of the stage; every bn (gn with group normalisation) is {scale,
bias} [C], a bn with batch_stats {mean, var} [C] at the same path:
  stem/conv/kernel [3, 3, C', C] or [7, 7, C', C], stem/bn
  stage<i>/block<j>/conv<1|2>/kernel [3, 3, C', C], bn<1|2>, or as bottleneck
    conv1/kernel [1, 1, C', C], conv2/kernel [3, 3, C, C], conv3/kernel [1, 1, C, 4 C],
    bn<1|2|3>
  stage<i>/block1/shortcut/{conv/kernel [1, 1, C', C or 4 C], bn} where shapes differ
  fc/kernel [C or 4 C, M], bias [M]
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax.models.conv import Conv
from fedfr_jax.models.initial import he_normal, uniform
from fedfr_jax.models.linen import (
    block_names,
    from_linen,
    rematerialised,
    sow_features,
    stage_blocks,
)
from fedfr_jax.models.norm import BatchNorm, GroupNorm
from fedfr_jax.types import Model

DEPTHS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
LEAST_BOTTLENECK = 50  # depth from which blocks are bottlenecks
EXPANSION = 4  # of a bottleneck's width to its output channels
STEMS = ("cifar", "imagenet")
NORMS = ("batch", "group")


def resnet(
    image_shape: Sequence[int],
    *,
    num_classes: int,
    depth: int = 18,
    blocks: Sequence[int] | None = None,
    widths: Sequence[int] = (64, 128, 256, 512),
    stem: str = "cifar",
    norm: str = "batch",
    groups: int = 32,
    lowering: str = "auto",
    dtype: Any = None,
    remat: bool = False,
) -> Model:
    """ResNet of a known depth, or of any numbers of blocks and widths; gives logits.

    Args:
      image_shape: (H, W, C); every stage but the first halves H and W, rounding up.
      num_classes: M.
      depth: a key of DEPTHS; with `blocks`, bottlenecks from LEAST_BOTTLENECK on.
      blocks: residual blocks of every stage, instead of those of `depth`.
      widths: channels of every stage; a bottleneck ends in four times as many.
      stem: "cifar", a 3x3 convolution, or "imagenet", 7x7 at stride 2 and max pooling.
      norm: "batch" or "group", whose groups must divide all widths.
      groups: of group normalisation.
      lowering: how convolutions are computed, see `conv.convolve`.
      dtype: of the convolutions, such as "bfloat16"; None for the dtype of the
        parameters. Normalisation and the linear layer compute in at least float32.
      remat: training keeps the input of every block only, and computes it again.

    Raises:
      ValueError: for an unknown depth, stem or norm, or blocks that do not fit the
        widths.
    """
    if stem not in STEMS:
        raise ValueError(f"stem must be cifar or imagenet, got {stem!r}.")
    if norm not in NORMS:
        raise ValueError(f"norm must be batch or group, got {norm!r}.")
    module = ResNet(
        blocks=stage_blocks(DEPTHS, depth, blocks, widths, minimum=1),
        widths=tuple(widths),
        num_classes=num_classes,
        is_bottleneck=depth >= LEAST_BOTTLENECK,
        stem=stem,
        norm=norm,
        groups=groups,
        lowering=lowering,
        dtype=dtype,
        remat=remat,
    )
    stages = {f"stage{i}": num for i, num in enumerate(module.blocks, 1)}
    units = ["stem", *block_names(stages), "fc"]
    return from_linen(module, image_shape, num_classes, blocks=units)


class Settings(NamedTuple):
    """What all the layers share; `resnet` documents it."""

    norm: str
    groups: int
    lowering: str
    dtype: Any


class Convolution(NamedTuple):
    """One of a block's convolutions."""

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


class ResNet(nn.Module):
    """The network; `resnet` documents its attributes."""

    blocks: tuple[int, ...]
    widths: tuple[int, ...]
    num_classes: int
    is_bottleneck: bool = False
    stem: str = "cifar"
    norm: str = "batch"
    groups: int = 32
    lowering: str = "auto"
    dtype: Any = None
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> logits [B, M]."""
        param_dtype = x.dtype
        settings = Settings(self.norm, self.groups, self.lowering, self.dtype)
        layers = bottleneck if self.is_bottleneck else basic
        block = rematerialised(Block) if self.remat else Block
        x = Stem(self.widths[0], self.stem, settings, name="stem")(x, train)
        for i, (width, num) in enumerate(zip(self.widths, self.blocks, strict=True)):
            strides = [1 if i == 0 else 2] + [1] * (num - 1)
            convolutions = tuple(layers(width, stride) for stride in strides)
            stage = Stage(block, convolutions, settings, name=f"stage{i + 1}")
            x = stage(x, train)
        x = sow_features(self, jnp.mean(x.astype(param_dtype), (1, 2)))
        init = uniform(1 / math.sqrt(x.shape[-1]))
        fc = nn.Dense(self.num_classes, kernel_init=init, bias_init=init, name="fc")
        return fc(x)


class Stem(nn.Module):
    """Convolution, normalisation, ReLU; with stride and pooling for large images."""

    width: int
    kind: str  # one of STEMS
    settings: Settings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> [B, H, W, width], or a quarter of H and W, rounded up."""
        is_large = self.kind == "imagenet"
        conv = Convolution(self.width, 7, 2) if is_large else Convolution(self.width)
        x = _conv(conv, self.settings, "conv")(x)
        x = nn.relu(_norm(self.settings)(x, train))
        return _max_pool(x) if is_large else x


class Stage(nn.Module):
    """Blocks, one after the other."""

    block: type[nn.Module]
    convolutions: tuple[tuple[Convolution, ...], ...]  # of every block
    settings: Settings

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
    settings: Settings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, C], rounded up."""
        y = x
        for i, conv in enumerate(self.convolutions):
            y = nn.relu(y) if i else y
            y = _conv(conv, self.settings, f"conv{i + 1}")(y)
            y = _norm(self.settings, i + 1)(y, train)
        stride = max(conv.stride for conv in self.convolutions)
        if stride > 1 or x.shape[-1] != y.shape[-1]:
            shape = Convolution(y.shape[-1], 1, stride)
            x = Shortcut(shape, self.settings, name="shortcut")(x, train)
        return nn.relu(x + y)


class Shortcut(nn.Module):
    """1x1 convolution, normalisation."""

    convolution: Convolution
    settings: Settings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C'] -> [B, H / stride, W / stride, C], rounded up."""
        x = _conv(self.convolution, self.settings, "conv")(x)
        return _norm(self.settings)(x, train)


def _conv(convolution, settings, name):
    return Conv(
        convolution.features,
        kernel_size=convolution.size,
        stride=convolution.stride,
        padding=convolution.size // 2,
        kernel_init=he_normal(),
        dtype=settings.dtype,
        lowering=settings.lowering,
        name=name,
    )


def _norm(settings, number=""):
    """Batch normalisation "bn<number>" or group normalisation "gn<number>"."""
    if settings.norm == "group":
        return GroupNorm(settings.groups, name=f"gn{number}")
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
