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

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax.models.layers import (
    ConvNorm,
    LayerSettings,
    Norm,
)
from fedfr_jax.models.linen import Network, from_linen, sow_features, xavier_uniform
from fedfr_jax.models.mobilenet import Multiplier, NumBlocks, mobilenet_trunk
from fedfr_jax.models.resnet import StemKind, Trunk, resnet_trunk
from fedfr_jax.parts import choose
from fedfr_jax.ranges import Blocks, Depth, Width, Widths
from fedfr_jax.schema import checked
from fedfr_jax.types import Model


def resnet_encoder(
    *,
    depth: Depth = 18,
    blocks: Blocks | None = None,
    widths: Widths = (64, 128, 256, 512),
    stem: StemKind = "imagenet",
    remat: bool = False,
) -> Trunk:
    """Encoder from the stages of a ResNet; see `resnet` for its settings."""
    return resnet_trunk(depth, blocks, widths, stem, remat)


def mobilenet_encoder(
    *,
    num_blocks: NumBlocks = 13,
    width: Multiplier = 1.0,
    stem: StemKind = "imagenet",
    remat: bool = False,
) -> Trunk:
    """Encoder from a MobileNet's last map of each size; see `mobilenet`."""
    return mobilenet_trunk(num_blocks, width, stem, remat)


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
    trunk: Trunk = choose("config.model.encoder", ENCODERS, encoder)
    names = [f"up{i}" for i in range(1, trunk.num_maps)]  # to the size of the i-th map
    settings = LayerSettings(dtype, norm, norm_groups)

    def forward(network, x, train):  # [B, H, W, C] -> logits [B, H, W, M]
        param_dtype = x.dtype
        *skips, y = trunk.maps(settings, x, train)
        sow_features(network, y.astype(param_dtype))
        for name, skip in zip(names[::-1], skips[::-1], strict=True):
            y = upsample(y, skip.shape[1:3])
            y = jnp.concatenate([y.astype(skip.dtype), skip], axis=-1)
            y = ConvNorm(width, settings, activation="relu", name=name)(y, train)
        last = nn.Conv(
            num_classes, (1, 1), kernel_init=xavier_uniform(), name="classifier"
        )
        return upsample(last(y.astype(param_dtype)), x.shape[1:3])

    blocks = [*trunk.names, *names[::-1], "classifier"]
    network = Network(forward)
    return from_linen(network, input_shape, num_classes, blocks=blocks)


def upsample(x: jax.Array, size: tuple[int, ...]) -> jax.Array:
    """Resize maps [B, h, w, C] to the size (H, W) bilinearly."""
    return jax.image.resize(x, (len(x), *size, x.shape[-1]), "bilinear")
