"""FedPer's ablation: a linear layer replaces all blocks but the last.

Arivazhagan et al. 2019, arXiv:1912.00818, section 4.4: the base is one linear layer,
the personalization part keeps a block and the classifier (K_P = 2). The paper does not
give the layer's shape: here it maps the flattened image to the block's input.

Parameters: base/kernel [H W C, s s D], bias [s s D]; block1 as the last of `resnet` or
`mobilenet`; fc/kernel [D, M], bias [M].
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
from flax import linen as nn

from fedfr_jax.models import mobilenet, resnet
from fedfr_jax.models.conv import Implementation
from fedfr_jax.models.heads import linear, mean_logits
from fedfr_jax.models.linen import from_linen
from fedfr_jax.models.resnet import LayerSettings, Norm
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
    settings = LayerSettings(norm, norm_groups, conv_implementation, dtype)
    module = LinearBase(num_classes, block, width, side, settings)
    names = ["base", "block1", "fc"]
    return from_linen(module, input_shape, num_classes, blocks=names)


class LinearBase(nn.Module):
    """Flax module; see `linear_base` for its attributes."""

    num_classes: int
    block: str
    width: int
    side: int
    settings: LayerSettings

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> logits [B, M]."""
        flat = x.reshape(len(x), -1)
        num_outputs = self.side * self.side * self.width
        y = linear(num_outputs, flat.shape[1], "base", self.settings.dtype)(flat)
        y = self._block()(y.reshape(len(x), self.side, self.side, self.width), train)
        return mean_logits(self, y, x.dtype)

    def _block(self):
        if self.block == "mobilenet":
            return mobilenet.Block(self.width, 1, self.settings, name="block1")
        convolutions = resnet.basic(self.width, 1)
        return resnet.Block(convolutions, self.settings, name="block1")
