"""ResNet: residual blocks of convolutions, for classification.

He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385, table 1,
with basic blocks (18, 34 layers) or bottlenecks (50 and more), of which `residual`
tells.

Parameters: those of `residual`, and fc/kernel [C, M], bias [M], where C is the channels
of the last stage.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax.models.initial import uniform
from fedfr_jax.models.linen import from_linen, sow_features
from fedfr_jax.models.residual import NORMS, Settings, Trunk, stage_maps, trunk_of
from fedfr_jax.schema import check_choice
from fedfr_jax.types import Model


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
    implementation: str = "auto",
    dtype: Any = None,
    remat: bool = False,
) -> Model:
    """ResNet of a known depth, or of any numbers of blocks and widths; gives logits.

    Args:
      image_shape: (H, W, C); every stage but the first halves H and W, rounding up.
      num_classes: M.
      depth: a key of `residual.DEPTHS`; with `blocks`, bottlenecks from 50 on.
      blocks: residual blocks of every stage, instead of those of `depth`.
      widths: channels of every stage; a bottleneck ends in four times as many.
      stem: "cifar", a 3x3 convolution, or "imagenet", 7x7 at stride 2 and max pooling.
      norm: "batch" or "group", whose groups must divide all widths.
      groups: of group normalisation.
      implementation: how convolutions are computed, see `conv.convolve`.
      dtype: of the convolutions, such as "bfloat16"; None for the dtype of the
        parameters. Normalisation and the linear layer compute in at least float32.
      remat: training keeps the input of every block only, and computes it again.

    Raises:
      ValueError: for an unknown depth, stem or norm, or blocks that do not fit the
        widths.
    """
    check_choice("norm", norm, NORMS)
    trunk = trunk_of(depth, blocks, widths, stem, remat)
    module = ResNet(trunk, num_classes, norm, groups, implementation, dtype)
    blocks = [*trunk.names, "fc"]
    return from_linen(module, image_shape, num_classes, blocks=blocks)


class ResNet(nn.Module):
    """The network; `resnet` documents its attributes."""

    trunk: Trunk
    num_classes: int
    norm: str = "batch"
    groups: int = 32
    implementation: str = "auto"
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> logits [B, M]."""
        param_dtype = x.dtype
        settings = Settings(self.norm, self.groups, self.implementation, self.dtype)
        x = stage_maps(self.trunk, settings, x, train)[-1]
        x = sow_features(self, jnp.mean(x.astype(param_dtype), (1, 2)))
        init = uniform(1 / math.sqrt(x.shape[-1]))
        fc = nn.Dense(self.num_classes, kernel_init=init, bias_init=init, name="fc")
        return fc(x)
