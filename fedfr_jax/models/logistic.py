"""Multinomial logistic regression, on vectors or flattened images.

`mclr` of the FedProx code (Li et al. 2020, arXiv:1812.06127), whose 1e-3 on kernels is
`optimizer = {"name": "sgd", "weight_decay": 1e-3, "decays": "kernel$"}` of a method.
Its features are the logits: the layer before them would be the data, which no training
moves.

Parameters: classifier/kernel [D, M], bias [M].
"""

from collections.abc import Sequence
from typing import Any

import jax
from flax import linen as nn

from fedfr_jax.models.initial import xavier_uniform
from fedfr_jax.models.linen import from_linen
from fedfr_jax.types import Model


def logistic(
    image_shape: Sequence[int], *, num_classes: int, dtype: Any = None
) -> Model:
    """One linear layer to `num_classes` logits.

    Args:
      image_shape: (H, W, C) or (D,).
      num_classes: M.
      dtype: of the product, such as "bfloat16"; None for that of the parameters.
    """
    module = Logistic(num_classes, dtype)
    return from_linen(module, image_shape, num_classes, blocks=["classifier"])


class Logistic(nn.Module):
    """The network; `logistic` documents its attribute."""

    num_classes: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, ...] -> [B, M]."""
        del train
        init = xavier_uniform()
        settings = {"dtype": self.dtype, "kernel_init": init, "name": "classifier"}
        layer = nn.Dense(self.num_classes, **settings)
        return layer(x.reshape(x.shape[0], -1)).astype(x.dtype)
