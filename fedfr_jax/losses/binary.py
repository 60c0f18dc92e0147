"""FedFR's personalized branch: binary classifiers of a client's classes.

FedFR's decoupled feature customization, https://arxiv.org/abs/2112.12496, which uses
the SphereFace2 loss of Wen et al. 2022, https://arxiv.org/abs/2108.01513.

FedFR differs from SphereFace2: every class has its own bias, starting at 0, and the
gradient flows through the margin and through the cosine's adjustment. This module
differs from FedFR's code: softplus in place of log(1 + e^x + 1e-8), 5e-10 apart.
"""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import chex
import jax
import jax.numpy as jnp
from annotated_types import Interval

from fedfr_jax.losses.margin import cosine, is_label
from fedfr_jax.ranges import MAX, NonNegative, Positive, Share
from fedfr_jax.types import PyTree

NUM_BRANCHES = 4


class Converter(NamedTuple):
    """Small network from the backbone's feature [D] to the branch's feature [D]."""

    init: Callable[[jax.Array, int], PyTree]  # (key, D) -> params
    apply: Callable[[PyTree, jax.Array], jax.Array]  # (params, [B, D]) -> [B, D]


def linear_converter_init(key: jax.Array, dim: int) -> PyTree:
    """Initialize a linear converter: identity `kernel` [D, D] and zero `bias` [D]."""
    del key
    return {"kernel": jnp.eye(dim), "bias": jnp.zeros(dim)}


def linear_converter(params: PyTree, features: jax.Array) -> jax.Array:
    """Affine map of features [B, D] to [B, D]."""
    return features @ params["kernel"] + params["bias"][None]


def bottleneck_converter_init(key: jax.Array, dim: int) -> PyTree:
    """Initialize four parallel two-layer bottlenecks, joined by a linear map.

    Weights and biases are uniform in +-1 / sqrt(inputs), so the converter does not
    start at the identity.

    Args:
      key: PRNG key.
      dim: D, a multiple of 4.

    Returns:
      `reduce` {kernel [4, D, D/4], bias [4, D/4]}, `mix` {kernel [4, D/4, D/4], bias
      [4, D/4]} and `join` {kernel [D, D], bias [D]}; kernels are (input, output).
    """
    if dim % NUM_BRANCHES:
        raise ValueError(f"dim must be a multiple of {NUM_BRANCHES}, got {dim}.")
    narrow, four = dim // NUM_BRANCHES, (NUM_BRANCHES,)
    reduce_key, mix_key, join_key = jax.random.split(key, 3)
    return {
        "reduce": _linear_init(reduce_key, four, dim, narrow),
        "mix": _linear_init(mix_key, four, narrow, narrow),
        "join": _linear_init(join_key, (), dim, dim),
    }


def _linear_init(key, stack, num_inputs, num_outputs):
    kernel_key, bias_key = jax.random.split(key)
    limit = num_inputs**-0.5
    kernel_shape, bias_shape = (*stack, num_inputs, num_outputs), (*stack, num_outputs)
    return {
        "kernel": jax.random.uniform(
            kernel_key, kernel_shape, minval=-limit, maxval=limit
        ),
        "bias": jax.random.uniform(bias_key, bias_shape, minval=-limit, maxval=limit),
    }


def bottleneck_converter(params: PyTree, features: jax.Array) -> jax.Array:
    """Features [B, D] plus the joined output of the four bottlenecks, [B, D]."""
    x = jnp.einsum("bi,nio->bno", features, params["reduce"]["kernel"])
    x = jax.nn.leaky_relu(x + params["reduce"]["bias"][None])
    x = jnp.einsum("bni,nio->bno", x, params["mix"]["kernel"])
    x = jax.nn.leaky_relu(x + params["mix"]["bias"][None])
    joined = x.reshape(features.shape) @ params["join"]["kernel"]
    return features + joined + params["join"]["bias"][None]


CONVERTERS = {
    "linear": Converter(linear_converter_init, linear_converter),
    "bottleneck": Converter(bottleneck_converter_init, bottleneck_converter),
}


def binary_branch(
    branch_features: jax.Array,
    weights: jax.Array,
    bias: jax.Array,
    labels: jax.Array,
    class_mask: jax.Array | None = None,
    *,
    scale: Positive = 30.0,
    margin: NonNegative = 0.4,
    t: Annotated[float, Interval(ge=1, le=MAX)] = 3.0,
    positive_weight: Share = 0.7,
) -> jax.Array:
    """Sum over the local classes of a binary cross entropy with margin.

    Args:
      branch_features: [B, D], converted.
      weights: [M, D], one row per local class.
      bias: [M].
      labels: int [B]. A label outside [0, M), or of a masked class, marks an image of
        the public set: a negative for every local class.
      class_mask: bool [M], False for a class that only pads the axis.
      scale: r, positive.
      margin: m, of the adjusted cosine.
      t: at least 1; the cosine c is adjusted to 2 ((c + 1) / 2)^t - 1, which spreads
        the similarities of wrong classes.
      positive_weight: lambda, in [0, 1], of the positive against the negatives.

    Returns:
      [B], non-negative, summed over classes.
    """
    num_classes, dim = weights.shape
    chex.assert_shape(branch_features, (labels.shape[0], dim))
    chex.assert_shape(bias, (num_classes,))
    adjusted = spread_out(cosine(branch_features, weights), t)
    is_positive = is_label(labels, num_classes)
    sign = jnp.where(is_positive, -1.0, 1.0).astype(adjusted.dtype)
    logits = scale * (adjusted + sign * margin) + bias[None]
    shares = (positive_weight / scale, (1 - positive_weight) / scale)
    return binary_cross_entropy(logits, labels, class_mask, weights=shares)


def spread_out(cosine: jax.Array, t: float) -> jax.Array:
    """SphereFace2's similarity adjustment 2 ((c + 1) / 2)^t - 1 of cosines c [...]."""
    # Clamped at 0 because rounding can pass cosine -1 and t need not be whole.
    half = jnp.maximum((cosine + 1) / 2, 0)
    return 2 * half**t - 1


def binary_cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    class_mask: jax.Array | None = None,
    *,
    weights: tuple[float, float] = (1.0, 1.0),
) -> jax.Array:
    """Sum over classes of the one-vs-rest binary cross entropies.

    Args:
      logits: [B, M].
      labels: int [B]; outside [0, M), or a masked class, makes all classes negatives.
      class_mask: bool [M], False for a class that only pads the axis.
      weights: of the true class and of each other one.

    Returns:
      [B], non-negative.
    """
    is_positive = is_label(labels, logits.shape[1])
    sign = jnp.where(is_positive, -1.0, 1.0).astype(logits.dtype)
    weight = jnp.where(is_positive, *weights).astype(logits.dtype)
    losses = weight * jax.nn.softplus(sign * logits)
    if class_mask is None:
        return jnp.sum(losses, axis=1)
    chex.assert_shape(class_mask, (logits.shape[1],))
    return jnp.sum(jnp.where(class_mask[None], losses, 0), axis=1)
