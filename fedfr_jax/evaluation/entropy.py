"""Where a segmentation network is unsure, and how many patterns its encoder sees.

Michieli, Toldo, Ozay, "FedMargin" (preprint arXiv:2105.08982), whose text names the two
maps: Shannon entropy over the classes of a pixel, and over the channels of a pixel of
the features, normalised to sum 1. Negative features are clipped to 0 first, which is
ours. Natural logarithms: in [0, ln M] and [0, ln D].
"""

import jax
import jax.numpy as jnp

LEAST = 1e-12  # added to a sum of channels


def softmax_entropy(logits: jax.Array) -> jax.Array:
    """Entropy [...] of the softmax of logits [..., M]."""
    log_p = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def feature_entropy(features: jax.Array) -> jax.Array:
    """Entropy [...] over the channels of features [..., D]; 0 where all are 0."""
    values = jnp.maximum(features, 0)
    share = values / (values.sum(axis=-1, keepdims=True) + LEAST)
    logs = jnp.log(jnp.where(share > 0, share, 1))
    return -jnp.sum(share * logs, axis=-1)


def enlarged_map(values: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Maps [B, h, w] at the size (H, W), bilinearly between the centres of pixels."""
    return jax.image.resize(values, (len(values), *size), "bilinear")
