"""Segmentation network: an encoder and a U-Net decoder.

Ronneberger, Fischer, Brox, "U-Net", arXiv:1505.04597, figure 1. As in FPN (Lin et al.,
arXiv:1612.03144) the encoder is a network for classification without its last layer.
Deviations from U-Net: images keep their size by padding, a step of the decoder has one
3x3 convolution after a bilinear enlargement, and all of them have one width; logits are
enlarged bilinearly to the size of the image.

Parameters: those of the encoder under their own names (see `resnet`, `mobilenet`);
for the i-th map of the encoder but the last,
  up<i>/conv/kernel [3, 3, C' + C, width], up<i>/bn (gn with group normalization)
  classifier/kernel [1, 1, width, M], bias [M]
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax.models.conv import Conv, ConvSettings, Implementation
from fedfr_jax.models.linen import from_linen, sow_features
from fedfr_jax.models.mobilenet import block_maps, block_names_of, parse_layers
from fedfr_jax.models.resnet import (
    Convolution,
    LayerSettings,
    Norm,
    StemKind,
    build_conv,
    build_norm,
    build_trunk,
    stage_maps,
)
from fedfr_jax.parts import choose
from fedfr_jax.ranges import Blocks, Depth, Positive, Width, Widths
from fedfr_jax.schema import checked
from fedfr_jax.types import Model


class Encoder(NamedTuple):
    """Encoder: maps an image to feature maps of decreasing size."""

    # (settings, x [B, H, W, C], train) -> maps of [B, h, w, C'], first to last, within
    # the call of a module
    maps: Callable[[LayerSettings, jax.Array, bool], list[jax.Array]]
    num_maps: int
    blocks: tuple[str, ...]  # as of a `Model`


def resnet_encoder(
    *,
    depth: Depth = 18,
    blocks: Blocks | None = None,
    widths: Widths = (64, 128, 256, 512),
    stem: StemKind = "imagenet",
    remat: bool = False,
) -> Encoder:
    """Encoder from the stages of a ResNet; see `resnet` for its settings."""
    trunk = build_trunk(depth, blocks, widths, stem, remat)

    def maps(settings, x, train):
        return stage_maps(trunk, settings, x, train)

    return Encoder(maps, len(trunk.blocks), tuple(trunk.names))


def mobilenet_encoder(
    *,
    num_blocks: Depth = 13,
    width: Positive = 1.0,
    stem: StemKind = "imagenet",
    remat: bool = False,
) -> Encoder:
    """Encoder from a MobileNet's last map of each size; see `mobilenet`."""
    layers = parse_layers(num_blocks, width, stem)

    def maps(settings, x, train):
        return block_maps(layers, settings, x, train, remat)

    num_maps = 1 + sum(stride > 1 for _, stride in layers[1:])
    return Encoder(maps, num_maps, tuple(block_names_of(layers)))


ENCODERS = {"resnet": resnet_encoder, "mobilenet": mobilenet_encoder}


@checked
def segmenter(
    input_shape: Sequence[int],
    *,
    num_classes: Width,
    encoder: Mapping = MappingProxyType({"name": "resnet"}),
    width: Width = 64,
    norm: Norm = "batch",
    norm_groups: Width = 32,
    conv_implementation: Implementation = "auto",
    dtype: Any = None,
) -> Model:
    """U-Net with logits [B, H, W, M]; its features are the encoder's last map.

    Args:
      input_shape: (H, W, C), any size.
      num_classes: M, of the model's `embedding_dim` too.
      encoder: {"name": a key of ENCODERS, and that encoder's settings}.
      width: channels of the decoder.
      norm: "batch" or "group", whose groups must divide all widths.
      norm_groups: of group normalization.
      dtype: of the convolutions, such as "bfloat16"; None for the dtype of the
        parameters. Normalization and logits compute in at least float32.
    """
    encoder = choose("config.model.encoder", ENCODERS, encoder)
    settings = LayerSettings(norm, norm_groups, conv_implementation, dtype)
    module = Segmenter(encoder, num_classes, width, settings)
    steps = [step_name(i) for i in reversed(range(encoder.num_maps - 1))]
    blocks = [*encoder.blocks, *steps, "classifier"]
    return from_linen(module, input_shape, num_classes, blocks=blocks)


def step_name(i: int) -> str:
    """Name of the decoder step that upsamples to the size of the i-th map, from 0."""
    return f"up{i + 1}"


class Segmenter(nn.Module):
    """Flax module; see `segmenter` for its attributes."""

    encoder: Encoder
    num_classes: int
    width: int
    settings: LayerSettings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> logits [B, H, W, M]."""
        size, param_dtype = x.shape[1:3], x.dtype
        *skips, y = self.encoder.maps(self.settings, x, train)
        sow_features(self, y.astype(param_dtype))
        for i in reversed(range(len(skips))):
            step = Up(self.width, self.settings, name=step_name(i))
            y = step(y, skips[i], train)
        last = Conv(
            self.num_classes,
            kernel_size=1,
            use_bias=True,
            settings=ConvSettings(self.settings.conv_implementation),
            name="classifier",
        )
        return upsample(last(y.astype(param_dtype)), size)


class Up(nn.Module):
    """Decoder step: upsample, join the encoder's map, convolve, norm, ReLU."""

    width: int
    settings: LayerSettings

    @nn.compact
    def __call__(self, y: jax.Array, skip: jax.Array, train: bool) -> jax.Array:
        """[B, h, w, C'] and a map [B, h', w', C] -> [B, h', w', width]."""
        y = upsample(y, skip.shape[1:3])
        y = jnp.concatenate([y.astype(skip.dtype), skip], axis=-1)
        y = build_conv(Convolution(self.width), self.settings, "conv")(y)
        return nn.relu(build_norm(self.settings)(y, train))


def upsample(x: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Resize maps [B, h, w, C] to the size (H, W) bilinearly."""
    return jax.image.resize(x, (len(x), *size, x.shape[-1]), "bilinear")
