"""MLP on tabular examples: numbers, and learned embeddings of categories.

Guo and Berkhahn 2016, "Entity embeddings of categorical variables", arXiv:1604.06737.
Parameters: embedding/embedding [V, E]; fc<i>/kernel [I, H], bias [H];
classifier/kernel [H, M], bias [M].
"""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax.models.linen import Network, from_linen, sow_features
from fedfr_jax.ranges import Count, Width, Widths
from fedfr_jax.schema import checked
from fedfr_jax.types import Model

KEYS = ("numbers", "categories")


@checked
def tabular(
    input_shape: Mapping[str, Sequence[int]],
    *,
    hidden_dims: Widths = (64, 64),
    num_classes: Count = 2,
    num_categories: Count = 256,
    category_dim: Width = 8,
) -> Model:
    """MLP with ReLU on {"numbers": [B, D], "categories": [B, C]}.

    Args:
      input_shape: {"numbers": (D,), "categories": (C,)}, as of the source `table`.
      hidden_dims: units of the layers.
      num_categories: V, vectors of categories; further ones share them (modulo V).
      category_dim: E.
    """
    if not isinstance(input_shape, Mapping) or {*input_shape} != {*KEYS}:
        raise ValueError(
            f"tabular needs inputs {list(KEYS)}, got {input_shape}. Use the data "
            "source table."
        )

    def forward(network, x, train):  # {"numbers": [B, D], "categories": [B, C]}
        del train
        codes = x["categories"].astype(jnp.int32) % num_categories
        embed = nn.Embed(num_categories, category_dim, name="embedding")
        vectors = embed(codes).reshape(len(codes), -1)
        h = jnp.concatenate([x["numbers"], vectors.astype(x["numbers"].dtype)], axis=1)
        for i, width in enumerate(hidden_dims, 1):
            h = nn.relu(nn.Dense(width, name=f"fc{i}")(h))
        return nn.Dense(num_classes, name="classifier")(sow_features(network, h))

    hidden = [f"fc{i}" for i in range(1, len(hidden_dims) + 1)]
    blocks = ["embedding", *hidden, "classifier"]
    return from_linen(Network(forward), input_shape, num_classes, blocks=blocks)
