"""Small networks of federated papers: CNN, MLP, LEAF, logistic regression.

`cnn`: two 3x3 convolutions, 2x2 max pooling, one hidden layer (the EMNIST network of
Reddi et al., arXiv:2003.00295, table 4, whose dropout is 0.25 and 0.5). `mlp`: one
hidden layer. The output is the hidden layer, an embedding, or with `num_classes` a
classifier's logits, linear in it.

Parameters: cnn: conv<1|2>/kernel [3, 3, I, O], bias [O]; both: fc/kernel [I, D], bias,
and with `num_classes` classifier/kernel [D, M], bias.

Of LEAF (Caldas et al. 2018, arXiv:1812.01097): `leaf_celeba` is four times a 3x3
convolution of 32 channels, batch normalization, 2x2 max pooling, ReLU, then a linear
layer. `leaf_femnist` is two 5x5 convolutions of 32 and 64 channels, each with ReLU and
2x2 max pooling, a layer of 2048, a linear layer. Both pad so that only pooling makes an
image smaller.

Parameters: conv<i>/kernel [k, k, I, O], bias [O]; bn<i>/{scale, bias} [O] with
batch_stats {mean, var}; fc/kernel [I, 2048], bias; classifier/kernel [I, M], bias [M].

`logistic`: multinomial logistic regression on vectors or flattened images, the `mclr`
of the FedProx code (Li et al. 2020, arXiv:1812.06127), whose 1e-3 on kernels is
`optimizer = {"name": "sgd", "weight_decay": 1e-3, "decays": "kernel$"}` of a method.
Its features are the logits: the layer before them would be the data, which no training
moves.

Parameters: classifier/kernel [D, M], bias [M].
"""

from collections.abc import Sequence
from typing import Any

from flax import linen as nn

from fedfr_jax.models.linen import (
    Network,
    from_linen,
    sow_features,
    xavier_uniform,
)
from fedfr_jax.models.norm import BatchNorm
from fedfr_jax.ranges import BelowOne, Count, Width, Widths
from fedfr_jax.schema import checked
from fedfr_jax.types import Model


@checked
def cnn(
    input_shape: Sequence[int],
    *,
    widths: Widths = (32, 64),
    embedding_dim: Width = 128,
    num_classes: Count | None = None,
    dropout: tuple[BelowOne, BelowOne] = (0.0, 0.0),
    dtype: Any = None,
) -> Model:
    """CNN: 3x3 convolutions without padding, 2x2 max pooling, a linear layer.

    Args:
      input_shape: (H, W, C), H and W large enough to leave 2 pixels before pooling.
      widths: channels of every convolution.
      embedding_dim: of the hidden layer, D.
      num_classes: M, for logits [B, M] instead of embeddings.
      dropout: shares of the pooled pixels' and of the hidden layer's numbers that a
        training step sets to zero.
    """
    check_pixels(input_shape, 2 * len(widths) + 2, f"{len(widths)} convolutions")

    def forward(network, x, train):  # [B, H, W, C] -> [B, D] or [B, M]
        param_dtype, (pooled, hidden) = x.dtype, dropout
        for i, width in enumerate(widths, 1):
            x = nn.relu(_conv(width, 3, "VALID", dtype, name=f"conv{i}")(x))
        x = nn.max_pool(x, (2, 2), (2, 2)).astype(param_dtype)
        x = nn.Dropout(pooled, deterministic=not train)(x)
        drop = nn.Dropout(hidden, deterministic=not train)
        return _hidden(network, x, embedding_dim, num_classes, drop=drop)

    network = Network(forward)
    convolutions = [f"conv{i}" for i in range(1, len(widths) + 1)]
    return _model(network, input_shape, convolutions, embedding_dim, num_classes)


def check_pixels(input_shape: Sequence[int], smallest: int, layers: str) -> None:
    """Raise ValueError for images that are too small for the layers."""
    if min(input_shape[:2]) < smallest:
        raise ValueError(
            f"input_shape must be at least {smallest} pixels high and wide for "
            f"{layers}, got {tuple(input_shape)}."
        )


@checked
def mlp(
    input_shape: Sequence[int],
    *,
    hidden_dim: Width = 64,
    num_classes: Count | None = None,
    dtype: Any = None,
) -> Model:
    """MLP: one hidden layer with ReLU on the flattened image; D = hidden_dim.

    With `num_classes`, M, another one makes logits [B, M] of it. `dtype` is that of the
    hidden layer, such as "bfloat16"; None for that of the parameters.
    """

    def forward(network, x, train):  # [B, ...] -> [B, D] or [B, M]
        del train
        return _hidden(network, x, hidden_dim, num_classes, dtype)

    return _model(Network(forward), input_shape, [], hidden_dim, num_classes)


def _hidden(network, x, hidden_dim, num_classes, dtype=None, drop=None):
    """Linear layer with ReLU, then the classifier, if any: [B, ...] -> [B, D or M]."""
    dense = _linear(hidden_dim, "fc", dtype)
    x = nn.relu(dense(x.reshape(x.shape[0], -1))).astype(x.dtype)
    x = drop(x) if drop else x
    if num_classes is None:
        return x
    return _linear(num_classes, "classifier")(sow_features(network, x))


def _model(network, input_shape, convolutions, hidden_dim, num_classes):
    top = ["fc"] if num_classes is None else ["fc", "classifier"]
    dim, blocks = num_classes or hidden_dim, [*convolutions, *top]
    return from_linen(network, input_shape, dim, blocks=blocks)


def _conv(width: int, size: int, padding: str, dtype: Any, *, name: str) -> nn.Conv:
    """Convolution with Xavier's initialization."""
    return nn.Conv(
        width,
        (size, size),
        padding=padding,
        dtype=dtype,
        kernel_init=xavier_uniform(),
        name=name,
    )


@checked
def leaf_celeba(
    input_shape: Sequence[int],
    *,
    num_classes: Count = 2,
    widths: Widths = (32, 32, 32, 32),
    dtype: Any = None,
) -> Model:
    """LEAF's network for CelebA (84 x 84 pixels); its features are the pooled maps.

    Args:
      input_shape: (H, W, C), halved once per width.
      widths: channels of every convolution.
      dtype: of all but the last layer, such as "bfloat16"; None for that of the
        parameters.
    """
    return _leaf(input_shape, num_classes, widths, dtype, size=3)


@checked
def leaf_femnist(
    input_shape: Sequence[int],
    *,
    num_classes: Count = 62,
    widths: Widths = (32, 64),
    hidden_dim: Width = 2048,
    dtype: Any = None,
) -> Model:
    """LEAF's network for FEMNIST (28 x 28 pixels); its features are the hidden layer.

    Args:
      hidden_dim: its units; the others as for `leaf_celeba`.
    """
    return _leaf(input_shape, num_classes, widths, dtype, 5, hidden_dim)


def _leaf(input_shape, num_classes, widths, dtype, size, hidden_dim=0):
    """Model of both LEAF networks: without a hidden layer, with normalizations."""
    check_pixels(input_shape, 2 ** len(widths), f"{len(widths)} poolings")
    has_norm = not hidden_dim

    def forward(network, x, train):  # [B, H, W, C] -> [B, M]
        param_dtype = x.dtype
        for i, width in enumerate(widths, 1):
            x = _conv(width, size, "SAME", dtype, name=f"conv{i}")(x)
            if has_norm:
                x = BatchNorm(name=f"bn{i}")(x, train)
            x = nn.relu(nn.max_pool(x, (2, 2), (2, 2)))
        x = x.reshape(x.shape[0], -1)
        if hidden_dim:
            x = nn.relu(_linear(hidden_dim, "fc", dtype)(x))
        x = sow_features(network, x.astype(param_dtype))
        return _linear(num_classes, "classifier")(x)

    blocks = []
    for i in range(1, len(widths) + 1):
        blocks += [f"conv{i}", f"bn{i}"] if has_norm else [f"conv{i}"]
    blocks += ["fc", "classifier"] if hidden_dim else ["classifier"]
    network = Network(forward)
    return from_linen(network, input_shape, num_classes, blocks=blocks)


@checked
def logistic(
    input_shape: Sequence[int], *, num_classes: Count, dtype: Any = None
) -> Model:
    """Logistic regression: one linear layer to `num_classes` logits.

    Args:
      input_shape: (H, W, C) or (D,).
      dtype: of the product, such as "bfloat16"; None for that of the parameters.
    """

    def forward(network, x, train):  # [B, ...] -> [B, M]
        del train
        layer = _linear(num_classes, "classifier", dtype)
        return layer(x.reshape(x.shape[0], -1)).astype(x.dtype)

    blocks = ["classifier"]
    return from_linen(Network(forward), input_shape, num_classes, blocks=blocks)


def _linear(num_outputs: int, name: str, dtype: Any = None) -> nn.Module:
    """Linear layer with Xavier's initialization."""
    return nn.Dense(num_outputs, dtype=dtype, kernel_init=xavier_uniform(), name=name)
