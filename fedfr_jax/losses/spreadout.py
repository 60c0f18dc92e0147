"""Spread-out loss on class embeddings (FedAwS, FedFace).

FedAwS: Yu, Rawat, Menon, Kumar 2020, https://arxiv.org/abs/2004.10342; FedFace:
Aggarwal, Zhou, Jain 2021, https://arxiv.org/abs/2104.03008, which replaces distances
by a hinge on cosines. The defaults of `spreadout` and `spread` are those of FedFR's
reimplementation; FedFace itself takes margin 0.3 and 10 steps.
"""

import chex
import jax
import jax.numpy as jnp
import optax

from fedfr_jax.losses.margin import cosine
from fedfr_jax.ranges import BelowOne, Cosine, NonNegative, Whole


def _valid_pairs(num_classes, class_mask):
    is_pair = ~jnp.eye(num_classes, dtype=bool)
    if class_mask is None:
        return is_pair
    chex.assert_shape(class_mask, (num_classes,))
    return is_pair & class_mask[:, None] & class_mask[None]


def spreadout_sum(
    weights: jax.Array, *, margin: float = 0.4, class_mask: jax.Array | None = None
) -> jax.Array:
    """Sum of max(0, cosine - margin)^2 over ordered pairs of different classes.

    Args:
      weights: [M, D], any length.
      margin: cosine up to which two classes may be close for free.
      class_mask: bool [M], False for a class that only pads the axis.

    Returns:
      [], non-negative.
    """
    excess = jax.nn.relu(cosine(weights, weights) - margin)
    is_pair = _valid_pairs(weights.shape[0], class_mask)
    return jnp.sum(jnp.where(is_pair, jnp.square(excess), 0))


def spreadout(
    weights: jax.Array, *, margin: float = 0.4, class_mask: jax.Array | None = None
) -> jax.Array:
    """`spreadout_sum` over the number of ordered pairs; 0 for fewer than 2."""
    total = spreadout_sum(weights, margin=margin, class_mask=class_mask)
    num_pairs = jnp.sum(_valid_pairs(weights.shape[0], class_mask))
    return total / jnp.maximum(num_pairs, 1).astype(total.dtype)


def spread(
    weights: jax.Array,
    *,
    steps: Whole = 20,
    learning_rate: NonNegative = 0.01,
    momentum: BelowOne = 0.9,
    weight_decay: NonNegative = 5e-4,
    margin: Cosine = 0.4,
    class_mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Run SGD steps on `spreadout` at the server, with a new optimizer state.

    Args:
      weights: [M, D] of all clients' classes.
      steps: number of updates.
      learning_rate: of the server.
      momentum: heavy ball.
      weight_decay: added to the gradient, before the momentum.
      margin: of `spreadout`.
      class_mask: bool [M]; a masked row is returned as it came.

    Returns:
      Weights [M, D] after the steps, and the loss before each step [steps].
    """
    sgd = optax.chain(
        optax.add_decayed_weights(weight_decay), optax.sgd(learning_rate, momentum)
    )

    def loss_fn(current):
        return spreadout(current, margin=margin, class_mask=class_mask)

    def step(carry, _):
        current, state = carry
        loss, gradient = jax.value_and_grad(loss_fn)(current)
        update, state = sgd.update(gradient, state, current)
        return (current + update, state), loss

    (moved, _), losses = jax.lax.scan(step, (weights, sgd.init(weights)), length=steps)
    if class_mask is None:
        return moved, losses
    return jnp.where(class_mask[:, None], moved, weights), losses
