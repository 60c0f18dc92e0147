"""FedPer's ablation: a linear layer replaces all blocks but the last.

Arivazhagan et al. 2019, arXiv:1912.00818, section 4.4: the base is one linear layer,
the personalization part keeps a block and the classifier (K_P = 2). The paper does not
give the layer's shape: here it maps the flattened image to the block's input.

Parameters: base/kernel [H W C, s s D], bias [s s D]; block1 as the last of `resnet` or
`mobilenet`; fc/kernel [D, M], bias [M].
"""

from collections.abc import Sequence
from typing import Any, Literal

from fedfr_jax.models.heads import linear, mean_logits
from fedfr_jax.models.layers import LayerSettings, Norm
from fedfr_jax.models.linen import Network, from_linen
from fedfr_jax.models.mobilenet import Block as SeparableBlock
from fedfr_jax.models.resnet import Block as ResidualBlock
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
    settings = LayerSettings(dtype, norm, norm_groups)

    def forward(network, x, train):  # [B, H, W, C] -> logits [B, M]
        flat = x.reshape(len(x), -1)
        y = linear(side * side * width, flat.shape[1], "base", dtype)(flat)
        y = y.reshape(len(x), side, side, width)
        if block == "mobilenet":
            y = SeparableBlock(width, 1, settings, name="block1")(y, train)
        else:
            y = ResidualBlock(width, settings, name="block1")(y, train)
        return mean_logits(network, y, num_classes, x.dtype)

    network, names = Network(forward), ["base", "block1", "fc"]
    return from_linen(network, input_shape, num_classes, blocks=names)
