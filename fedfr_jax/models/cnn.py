"""Two small networks for small images: the ones federated learning papers share.

`cnn`: two 3x3 convolutions, 2x2 max pooling, one hidden layer (the EMNIST network of
Reddi et al., arXiv:2003.00295, table 4, without dropout). `mlp`: one hidden layer.
The output is the hidden layer, an embedding, or with `num_classes` a classifier's
logits, linear in it.

Parameters: cnn: conv<1|2>/kernel [3, 3, I, O], bias [O]; both: fc/kernel [I, D], bias,
and with `num_classes` classifier/kernel [D, M], bias.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax.models.conv import Conv
from fedfr_jax.models.initial import xavier_uniform
from fedfr_jax.models.linen import check_widths, from_linen, sow_features
from fedfr_jax.types import Model


def cnn(
    image_shape: Sequence[int],
    *,
    widths: Sequence[int] = (32, 64),
    embedding_dim: int = 128,
    num_classes: int | None = None,
    implementation: str = "auto",
    dtype: Any = None,
) -> Model:
    """3x3 convolutions without padding, 2x2 max pooling, linear, each with ReLU.

    Args:
      image_shape: (H, W, C), H and W large enough to leave 2 pixels before pooling.
      widths: channels of every convolution.
      embedding_dim: of the hidden layer, D.
      num_classes: M, for logits [B, M] instead of embeddings.
      implementation: how convolutions are computed, see `conv.convolve`.
      dtype: of the convolutions, such as "bfloat16"; None for that of the parameters.

    Raises:
      ValueError: for widths that are none, or an image that is too small.
    """
    check_widths(widths)
    smallest = 2 * len(widths) + 2
    if min(image_shape[:2]) < smallest:
        raise ValueError(
            f"image_shape must be at least {smallest} pixels high and wide for "
            f"{len(widths)} convolutions, got {tuple(image_shape)}."
        )
    module = SmallCNN(tuple(widths), embedding_dim, num_classes, implementation, dtype)
    convolutions = [f"conv{i + 1}" for i in range(len(widths))]
    return _model(module, image_shape, convolutions, embedding_dim, num_classes)


def mlp(
    image_shape: Sequence[int],
    *,
    hidden: int = 64,
    num_classes: int | None = None,
    dtype: Any = None,
) -> Model:
    """One linear layer with ReLU on the flattened image, D = hidden.

    With `num_classes`, M, another one makes logits [B, M] of it. `dtype` is that of the
    hidden layer, such as "bfloat16"; None for that of the parameters.
    """
    module = SmallMLP(hidden, num_classes, dtype)
    return _model(module, image_shape, [], hidden, num_classes)


def _model(module, image_shape, blocks, hidden, num_classes):
    if num_classes is None:
        return from_linen(module, image_shape, hidden, blocks=[*blocks, "fc"])
    blocks = [*blocks, "fc", "classifier"]
    return from_linen(module, image_shape, num_classes, blocks=blocks)


class SmallCNN(nn.Module):
    """The network; `cnn` documents its attributes."""

    widths: tuple[int, ...]
    embedding_dim: int
    num_classes: int | None = None
    implementation: str = "auto"
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> [B, D] or [B, M]."""
        del train
        param_dtype = x.dtype
        for i, width in enumerate(self.widths):
            conv = Conv(
                width,
                use_bias=True,
                implementation=self.implementation,
                dtype=self.dtype,
                name=f"conv{i + 1}",
            )
            x = nn.relu(conv(x))
        x = max_pool(x).astype(param_dtype)
        return _top(self, self.embedding_dim, x)


class SmallMLP(nn.Module):
    """Flatten, linear, ReLU; `mlp` documents its attributes."""

    hidden: int
    num_classes: int | None = None
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, ...] -> [B, hidden] or [B, M]."""
        del train
        return _top(self, self.hidden, x, self.dtype)


def max_pool(x: jax.Array) -> jax.Array:
    """2x2 max pooling, [B, H, W, C] -> [B, H // 2, W // 2, C].

    A reshape, because reduce_window is slow in XLA:CPU's backward pass.
    """
    num, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    x = x.reshape(num, height // 2, 2, width // 2, 2, channels)
    return jnp.max(x, axis=(2, 4))


def _top(module, hidden, x, dtype=None):
    """Linear layer with ReLU, then the classifier, if any: [B, ...] -> [B, D or M]."""
    init = xavier_uniform()
    dense = nn.Dense(hidden, dtype=dtype, kernel_init=init, name="fc")
    x = nn.relu(dense(x.reshape(x.shape[0], -1))).astype(x.dtype)
    if module.num_classes is None:
        return x
    init = xavier_uniform()
    top = nn.Dense(module.num_classes, kernel_init=init, name="classifier")
    return top(sow_features(module, x))
