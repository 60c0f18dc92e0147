"""MLP on tabular examples: numbers, and learned embeddings of categories.

Guo and Berkhahn 2016, "Entity embeddings of categorical variables", arXiv:1604.06737.
Parameters: embedding/embedding [V, E]; fc<i>/kernel [I, H], bias [H];
classifier/kernel [H, M], bias [M].
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax.models.linen import from_linen, sow_features
from fedfr_jax.ranges import Count, Width, Widths
from fedfr_jax.schema import checked
from fedfr_jax.types import Model


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
    module = Tabular(tuple(hidden_dims), num_classes, num_categories, category_dim)
    blocks = [f"fc{i + 1}" for i in range(len(hidden_dims))]
    blocks = ["embedding", *blocks, "classifier"]
    return from_linen(module, input_shape, num_classes, blocks=blocks)


KEYS = ("numbers", "categories")


class Tabular(nn.Module):
    """Flax module; see `tabular` for its attributes."""

    hidden_dims: tuple[int, ...]
    num_classes: int
    num_categories: int
    category_dim: int

    @nn.compact
    def __call__(self, x: Mapping[str, jax.Array], train: bool) -> jax.Array:
        """{"numbers": [B, D], "categories": [B, C]} -> [B, M]."""
        del train
        codes = x["categories"].astype(jnp.int32) % self.num_categories
        embed = nn.Embed(self.num_categories, self.category_dim, name="embedding")
        vectors = embed(codes).reshape(len(codes), -1)
        h = jnp.concatenate([x["numbers"], vectors.astype(x["numbers"].dtype)], axis=1)
        for i, width in enumerate(self.hidden_dims):
            h = nn.relu(nn.Dense(width, name=f"fc{i + 1}")(h))
        return nn.Dense(self.num_classes, name="classifier")(sow_features(self, h))
