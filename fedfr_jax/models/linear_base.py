"""FedPer's ablation: a linear layer replaces all blocks but the last.

FedPer's ablation (Arivazhagan et al. 2019, arXiv:1912.00818, section 4.4): the base is
one linear layer, the personalization part keeps a block and the classifier (K_P = 2).
The paper does not give the layer's shape: here it maps the flattened image to the
block's input.

Parameters: base/kernel [H W C, s s D], bias [s s D]; block1 as the last of `resnet` or
`mobilenet`; fc/kernel [D, M], bias [M].
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax.models import mobilenet, resnet
from fedfr_jax.models.conv import Implementation
from fedfr_jax.models.linen import from_linen, sow_features, uniform
from fedfr_jax.models.resnet import Norm
from fedfr_jax.ranges import Count, Width
from fedfr_jax.schema import checked
from fedfr_jax.types import Model


@checked
def linear_base(
    input_shape: Sequence[int],
    *,
    num_classes: Count,
    block: Literal["resnet", "mobilenet"] = "resnet",
    width: Width = 512,
    side: Width = 4,
    norm: Norm = "batch",
    norm_groups: Width = 32,
    conv_implementation: Implementation = "auto",
    dtype: Any = None,
) -> Model:
    """Linear layer, one block that keeps its input's shape, and a classifier.

    Args:
      input_shape: (H, W, C); the linear layer has H W C side^2 width weights.
      block: whose block, "resnet" (a basic one) or "mobilenet".
      width: channels D of the block.
      side: s, pixels of the block's input on each side.
      norm: "batch" or "group", whose groups must divide the width.
      norm_groups: of group normalization.
      dtype: of the base and the block, such as "bfloat16"; None for that of the
        parameters.
    """
    settings = norm, norm_groups, conv_implementation, dtype
    module = LinearBase(num_classes, block, width, side, *settings)
    names = ["base", "block1", "fc"]
    return from_linen(module, input_shape, num_classes, blocks=names)


class LinearBase(nn.Module):
    """Flax module; see `linear_base` for its attributes."""

    num_classes: int
    block: str
    width: int
    side: int
    norm: str
    norm_groups: int
    conv_implementation: str = "auto"
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> logits [B, M]."""
        shape, param_dtype = (len(x), self.side, self.side, self.width), x.dtype
        flat = x.reshape(x.shape[0], -1)
        x = _dense(math.prod(shape[1:]), flat, "base", self.dtype)
        x = self._block()(x.reshape(shape), train)
        x = sow_features(self, jnp.mean(x.astype(param_dtype), (1, 2)))
        return _dense(self.num_classes, x, "fc")

    def _block(self):
        shared = (self.norm, self.norm_groups, self.conv_implementation, self.dtype)
        if self.block == "mobilenet":
            settings = mobilenet.LayerSettings(*shared)
            return mobilenet.Block(self.width, 1, settings, name="block1")
        settings = resnet.LayerSettings(*shared)
        return resnet.Block(resnet.basic(self.width, 1), settings, name="block1")


def _dense(features, x, name, dtype=None):
    """Linear layer initialized as PyTorch's."""
    init = uniform(1 / math.sqrt(x.shape[-1]))
    start = {"kernel_init": init, "bias_init": init}
    return nn.Dense(features, dtype=dtype, name=name, **start)(x)
