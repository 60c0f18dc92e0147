"""Two small networks for small images: the ones federated learning papers share.

`cnn`: two 3x3 convolutions, 2x2 max pooling, one hidden layer (the EMNIST network of
Reddi et al., arXiv:2003.00295, table 4, without dropout). `mlp`: one hidden layer.
The hidden layer is the embedding; the classifier lives outside the model.

Parameters: cnn: conv<1|2>/kernel [3, 3, I, O], bias [O]; both: fc/kernel [I, D], bias.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax.models.conv import Conv
from fedfr_jax.models.initial import xavier_uniform
from fedfr_jax.models.linen import from_linen
from fedfr_jax.types import Model


def cnn(
    image_shape: Sequence[int],
    *,
    widths: Sequence[int] = (32, 64),
    embedding_dim: int = 128,
    lowering: str = "auto",
    dtype: Any = None,
) -> Model:
    """3x3 convolutions without padding, 2x2 max pooling, linear, each with ReLU.

    Args:
      image_shape: (H, W, C), H and W large enough to leave 2 pixels before pooling.
      widths: channels of every convolution.
      embedding_dim: D.
      lowering: how convolutions are computed, see `conv.convolve`.
      dtype: of the convolutions; None for the dtype of the parameters.

    Raises:
      ValueError: when the image is too small.
    """
    smallest = 2 * len(widths) + 2
    if min(image_shape[:2]) < smallest:
        raise ValueError(
            f"image_shape must be at least {smallest} pixels high and wide for "
            f"{len(widths)} convolutions, got {tuple(image_shape)}."
        )
    module = SmallCNN(tuple(widths), embedding_dim, lowering, dtype)
    return from_linen(module, image_shape, embedding_dim)


def mlp(image_shape: Sequence[int], *, hidden: int = 64) -> Model:
    """One linear layer with ReLU on the flattened image, D = hidden."""
    return from_linen(SmallMLP(hidden), image_shape, hidden)


class SmallCNN(nn.Module):
    """The network; `cnn` documents its attributes."""

    widths: tuple[int, ...]
    embedding_dim: int
    lowering: str = "auto"
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> [B, D]."""
        del train
        param_dtype = x.dtype
        for i, width in enumerate(self.widths):
            conv = Conv(
                width,
                use_bias=True,
                lowering=self.lowering,
                dtype=self.dtype,
                name=f"conv{i + 1}",
            )
            x = nn.relu(conv(x))
        x = max_pool(x).astype(param_dtype)
        return _hidden(self.embedding_dim, x)


class SmallMLP(nn.Module):
    """Flatten, linear, ReLU."""

    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, ...] -> [B, hidden]."""
        del train
        return _hidden(self.hidden, x)


def max_pool(x: jax.Array) -> jax.Array:
    """2x2 max pooling, [B, H, W, C] -> [B, H // 2, W // 2, C].

    A reshape, because reduce_window is slow in XLA:CPU's backward pass.
    """
    num, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    x = x.reshape(num, height // 2, 2, width // 2, 2, channels)
    return jnp.max(x, axis=(2, 4))


def _hidden(features, x):
    """Linear layer with ReLU on the flattened input, [B, ...] -> [B, features]."""
    dense = nn.Dense(features, kernel_init=xavier_uniform(), name="fc")
    return nn.relu(dense(x.reshape(x.shape[0], -1)))
