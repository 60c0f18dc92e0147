"""Model-contrastive loss of MOON and FedFR.

MOON: Li, He, Song 2021, https://arxiv.org/abs/2103.16257, equation 3. FedFR,
https://arxiv.org/abs/2112.12496, applies it to the backbone's feature, without a
projection head, and so can any caller.
"""

import chex
import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from fedfr_jax.losses.margin import normalize


def model_contrastive(
    features: jax.Array,
    global_features: jax.Array,
    previous_features: jax.Array,
    *,
    temperature: float = 0.5,
) -> jax.Array:
    """MOON's loss: the global feature is positive, previous ones negative.

    -log(e^p / (e^p + sum_r e^q_r)), with p and q_r the cosines over the temperature.

    Args:
      features: [B, D] of the model in training; the only argument with a gradient.
      global_features: [B, D] of the same images in the round's global model.
      previous_features: [B, D] in the client's previous model, or [R, B, D] in R.
      temperature: positive.

    Returns:
      [B], non-negative.
    """
    chex.assert_rank(features, 2)
    chex.assert_equal_shape([features, global_features])
    chex.assert_rank(previous_features, {2, 3})
    previous = previous_features.reshape(-1, *features.shape)
    frozen = jnp.concatenate([global_features[None], previous])
    # Each length is clamped by itself, at 1e-8, as the published code's library does.
    current = normalize(features, eps=1e-8)
    frozen = normalize(stop_gradient(frozen), eps=1e-8)
    cosines = jnp.sum(current[None] * frozen, axis=-1) / temperature
    positive, negative = cosines[0], cosines[1:]
    # One model, as nearly always, is its own sum: fewer operations to compile.
    negatives = negative[0] if len(negative) == 1 else jax.nn.logsumexp(negative, 0)
    # softplus(q - p) is the cross entropy written so that nothing can overflow.
    return jax.nn.softplus(negatives - positive)
