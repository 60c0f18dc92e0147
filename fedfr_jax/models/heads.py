"""Heads: from the last feature map to an embedding, and MOON's projection.

All linear layers start as PyTorch's.

MOON's projection is between a network's features and its classifier (Li, He, Song 2021,
arXiv:2103.16257, section 3.2): two linear layers with a ReLU between them, whose output
the contrastive term compares and the classifier takes. Parameters besides those of the
network, whose last block is the classifier: projection/hidden/kernel [D, D], bias [D],
projection/out/kernel [D, P], bias [P]; the classifier's kernel is [P, M].

The names of the heads of a face network are those of ArcFace's released code; E is the
paper's choice, section 3.1 of arXiv:1801.07698. Parameters, C = channels of the map,
D = embedding; bn is {scale, bias} [C], bn_out {bias} [D] with its scale frozen at 1:
  E    bn, dropout, fc/kernel [h w C, D], fc/bias, bn_out
  F    bn, dropout, fc
  GAP  bn, the mean over pixels, fc/kernel [C, D], fc/bias, bn_out
  GDC  pixels/kernel [h, w, C], the weights of a sum over pixels for each channel
       (MobileFaceNets, arXiv:1804.07573, section 3.1); bn, fc, bn_out
  moe  masked/{bn, fc}, plain/{bn, fc} and gate/{bn, fc [h w C, 2]}

moe is the first round's network of BigFace (the challenge's report, section 2): p of
the expert for masked faces and 1 - p of the one for plain faces, p the second number of
the gate's softmax. That p weighs the masked expert is our reading. How the gate is
taught is not published: its logits are the model's `features`, and ours is a loss that
compares them with whether a mask was put on (`gate_weight` of central training).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedfr_jax.models.linen import normal, sow_features, uniform
from fedfr_jax.models.norm import BatchNorm
from fedfr_jax.ranges import Width
from fedfr_jax.schema import checked
from fedfr_jax.types import Model

NAME = "projection"


@checked
def with_projection(model: Model, *, projection: Width) -> Model:
    """Insert MOON's projection of size P before a model's classifier."""
    top = model.blocks[-1] if model.blocks else ""
    shapes = jax.eval_shape(model.init, jax.random.key(0))["params"]
    network_features = model.apply_with_features
    if network_features is None or "kernel" not in shapes.get(top, {}):
        raise ValueError(
            "projection needs a model with features and a linear classifier, got "
            "another."
        )
    dim, num_classes = shapes[top]["kernel"].shape

    def init(key):
        first, *keys = jax.random.split(key, 4)
        variables = model.init(first)
        sizes = ((dim, dim), (dim, projection), (projection, num_classes))
        hidden, out, head = map(projection_layer, keys, sizes)
        added = {NAME: {"hidden": hidden, "out": out}, top: head}
        return {**variables, "params": {**variables["params"], **added}}

    def features(variables, x, train=False, key=None):
        params = dict(variables["params"])
        added, head = params.pop(NAME), params.pop(top)
        # The output of the network's own classifier is unused, and so not computed.
        unused = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[top])
        inner = {**variables, "params": {**params, top: unused}}
        _, inputs, stats = network_features(inner, x, train, key=key)
        hidden = jax.nn.relu(through(added["hidden"], inputs))
        projected = through(added["out"], hidden)
        return through(head, projected), projected, stats

    def apply(variables, x, train=False, key=None):
        logits, _, stats = features(variables, x, train, key)
        return logits, stats

    blocks = (*model.blocks[:-1], NAME, top)
    return model._replace(
        init=init,
        apply=apply,
        apply_with_features=features,
        blocks=blocks,
    )


def projection_layer(key: jax.Array, size: tuple[int, int]) -> dict[str, jax.Array]:
    """Initialize kernel [I, O] and bias [O] uniformly within 1 / sqrt(I)."""
    draw = lambda key, shape: jax.random.uniform(key, shape, minval=-1.0, maxval=1.0)
    kernel_key, bias_key = jax.random.split(key)
    bound = 1 / math.sqrt(size[0])
    kernel, bias = draw(kernel_key, size), draw(bias_key, size[1:])
    return {"kernel": bound * kernel, "bias": bound * bias}


def through(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Apply a linear layer to x [B, I]: [B, O]."""
    return x @ layer["kernel"] + layer["bias"][None]


HEADS = {  # name: its units, in the order of the data
    "E": ("bn", "fc", "bn_out"),
    "F": ("bn", "fc"),
    "GAP": ("bn", "fc", "bn_out"),
    "GDC": ("pixels", "bn", "fc", "bn_out"),
    "moe": ("masked", "plain", "gate"),
}
WITH_DROPOUT = ("E", "F")


def check_head(head: str, dropout: float) -> None:
    """Raise ValueError for a dropout that the head does not have."""
    if dropout and head not in WITH_DROPOUT:
        raise ValueError(f"dropout must be 0 for head {head}, got {dropout}.")


def embed(
    network: nn.Module,
    x: jax.Array,
    train: bool,
    head: str,
    embedding_dim: int,
    dropout: float,
) -> jax.Array:
    """Embed a map [B, h, w, C] as [B, D], within the call of `network`."""
    if head == "moe":
        return _experts(network, x, train, embedding_dim)
    if head == "GDC":
        x = Pixels(name="pixels")(x)
    x = BatchNorm(name="bn")(x, train)
    if head == "GAP":
        x = jnp.mean(x, (1, 2))
    elif head in WITH_DROPOUT:
        x = nn.Dropout(dropout, deterministic=not train)(x)
    x = x.reshape(x.shape[0], -1)
    x = linear(embedding_dim, x.shape[1], "fc")(x)
    return x if head == "F" else BatchNorm(name="bn_out", use_scale=False)(x, train)


def _experts(network, x, train, embedding_dim):
    sizes = {"masked": embedding_dim, "plain": embedding_dim, "gate": 2}
    masked, plain, gate = (Expert(n, name=name)(x, train) for name, n in sizes.items())
    share = nn.softmax(sow_features(network, gate))[:, 1:]
    return share * masked + (1 - share) * plain


class Expert(nn.Module):
    """Batch normalization, then a linear layer on all pixels."""

    num_outputs: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B, h, w, C] -> [B, num_outputs]."""
        x = BatchNorm(name="bn")(x, train)
        x = x.reshape(x.shape[0], -1)
        return linear(self.num_outputs, x.shape[1], "fc")(x)


class Pixels(nn.Module):
    """Weighted sum over the pixels, with a weight per pixel and channel."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, h, w, C] -> [B, C]."""
        init = normal(math.sqrt(2 / (x.shape[1] * x.shape[2])))  # He normal
        kernel = self.param("kernel", init, x.shape[1:])
        return jnp.einsum("bhwc,hwc->bc", x, kernel.astype(x.dtype))


def linear(
    num_outputs: int, num_inputs: int, name: str, dtype: Any = None
) -> nn.Module:
    """Linear layer initialized as PyTorch's: uniform within 1 / sqrt(num_inputs)."""
    init = uniform(1 / math.sqrt(num_inputs))
    return nn.Dense(
        num_outputs, kernel_init=init, bias_init=init, dtype=dtype, name=name
    )


def mean_logits(
    network: nn.Module,
    x: jax.Array,
    num_classes: int,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Logits [B, M] by the layer "fc" of the mean over pixels of a map [B, h, w, C].

    Args:
      network: within its call; its features are the means.
      dtype: of the means.
    """
    x = sow_features(network, jnp.mean(x.astype(dtype), (1, 2)))
    return linear(num_classes, x.shape[-1], "fc")(x)
