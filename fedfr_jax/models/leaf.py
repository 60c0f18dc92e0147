"""The two convolutional networks of LEAF (Caldas et al. 2018, arXiv:1812.01097).

`leaf_celeba`: four times a 3x3 convolution of 32 channels, batch normalisation, 2x2 max
pooling, ReLU, then a linear layer. `leaf_femnist`: two 5x5 convolutions of 32 and 64
channels, each with ReLU and 2x2 max pooling, a layer of 2048, a linear layer. Both pad
so that only pooling makes an image smaller.

Parameters: conv<i>/kernel [k, k, I, O], bias [O]; bn<i>/{scale, bias} [O] with
batch_stats {mean, var}; fc/kernel [I, 2048], bias; classifier/kernel [I, M], bias [M].
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax.models.conv import Conv
from fedfr_jax.models.initial import xavier_uniform
from fedfr_jax.models.linen import check_widths, from_linen, sow_features
from fedfr_jax.models.norm import BatchNorm
from fedfr_jax.types import Model


def leaf_celeba(
    image_shape: Sequence[int],
    *,
    num_classes: int = 2,
    widths: Sequence[int] = (32, 32, 32, 32),
    implementation: str = "auto",
    dtype: Any = None,
) -> Model:
    """The network for CelebA, images of 84 pixels in LEAF; features behind pooling.

    Args:
      image_shape: (H, W, C), halved once per width.
      num_classes: M.
      widths: channels of every convolution.
      implementation: how convolutions are computed, see `conv.convolve`.
      dtype: of all but the last layer, such as "bfloat16"; None for that of the
        parameters.

    Raises:
      ValueError: when the image is too small.
    """
    module = LeafCNN(num_classes, tuple(widths), 3, True, 0, implementation, dtype)
    return _model(image_shape, module)


def leaf_femnist(
    image_shape: Sequence[int],
    *,
    num_classes: int = 62,
    widths: Sequence[int] = (32, 64),
    hidden: int = 2048,
    implementation: str = "auto",
    dtype: Any = None,
) -> Model:
    """The network for FEMNIST, images of 28 pixels; features of the hidden layer.

    Args:
      hidden: its units; the others as for `leaf_celeba`.

    Raises:
      ValueError: when the image is too small.
    """
    settings = 5, False, hidden, implementation, dtype
    module = LeafCNN(num_classes, tuple(widths), *settings)
    return _model(image_shape, module)


def _model(image_shape, module):
    check_widths(module.widths)
    smallest = 2 ** len(module.widths)
    if min(image_shape[:2]) < smallest:
        raise ValueError(
            f"image_shape must be at least {smallest} pixels high and wide for "
            f"{len(module.widths)} poolings, got {tuple(image_shape)}."
        )
    numbers = range(1, len(module.widths) + 1)
    kinds = ("conv", "bn") if module.has_norm else ("conv",)
    blocks = [f"{kind}{i}" for i in numbers for kind in kinds]
    blocks += ["fc"] * bool(module.hidden) + ["classifier"]
    return from_linen(module, image_shape, module.num_classes, blocks=blocks)


class LeafCNN(nn.Module):
    """Both networks; `leaf_celeba` and `leaf_femnist` document the attributes."""

    num_classes: int
    widths: tuple[int, ...]
    kernel_size: int
    has_norm: bool
    hidden: int  # 0 for none
    implementation: str = "auto"
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, H, W, C] -> [B, M]."""
        param_dtype = x.dtype
        for i, width in enumerate(self.widths, 1):
            x = self._conv(width, i)(x)
            if self.has_norm:
                x = BatchNorm(name=f"bn{i}")(x, train)
            x = nn.relu(_max_pool(x))
        x = x.reshape(x.shape[0], -1)
        if self.hidden:
            init = xavier_uniform()
            settings = {"dtype": self.dtype, "kernel_init": init, "name": "fc"}
            x = nn.relu(nn.Dense(self.hidden, **settings)(x))
        init = xavier_uniform()
        top = nn.Dense(self.num_classes, kernel_init=init, name="classifier")
        return top(sow_features(self, x.astype(param_dtype)))

    def _conv(self, width, number):
        return Conv(
            width,
            kernel_size=self.kernel_size,
            padding=self.kernel_size // 2,
            use_bias=True,
            implementation=self.implementation,
            dtype=self.dtype,
            name=f"conv{number}",
        )


def _max_pool(x):
    """2x2 max pooling, [B, H, W, C] -> [B, H // 2, W // 2, C].

    By pairs: the derivative of a maximum over an axis divides by the number of equals,
    which is 0 where the compiler computes x twice and rounds otherwise.
    """
    height, width = (size // 2 * 2 for size in x.shape[1:3])
    rows = jnp.maximum(x[:, 0:height:2], x[:, 1:height:2])
    return jnp.maximum(rows[:, :, 0:width:2], rows[:, :, 1:width:2])
