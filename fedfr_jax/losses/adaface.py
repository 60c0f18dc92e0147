"""AdaFace: a margin by the quality of an image, for which its feature's length stands.

Kim, Jain, Liu 2022, https://arxiv.org/abs/2204.00964, equations 10 to 15, and the
released code. A feature that is long for its batch, of a good image, gets a margin that
stresses hard examples, a short one a margin that stresses easy ones. The length is a
constant for the gradient. The running mean and deviation of lengths are the state.
"""

import jax
import jax.numpy as jnp

from fedfr_jax.losses.contract import Margin
from fedfr_jax.schema import POSITIVE, check_ranges

NORMS = (1e-3, 100.0)  # of lengths that count
MOST_COSINE = 0.999
LEAST_ANGLE = 1e-3


def adaface(
    *, scale: float = 64.0, margin: float = 0.4, h: float = 0.333, rate: float = 0.01
) -> Margin:
    """Logits scale * (cos(angle - margin v) - margin - margin v) at the label.

    v = clip(h (length - mean) / deviation, -1, 1). Cosines are clipped to +-0.999 and
    the moved angle to [0.001, pi - 0.001], which stops the gradient there.

    Args:
      scale: inverse temperature, positive.
      margin: m, at least 0.
      h: deviations of length that make the margin's full change are 1 / h; positive.
      rate: weight of a batch's mean and deviation in the running ones, in (0, 1]; the
        released code's `t_alpha`.

    Raises:
      ValueError: for an h or a rate out of range.
    """
    bounds = {"h": POSITIVE, "rate": (POSITIVE[0], 1)}
    check_ranges("margin_options.", {"h": h, "rate": rate}, bounds)

    def move(state, seen):
        mean, deviation = _moments(jnp.clip(seen.norm, *NORMS), seen.is_valid)
        deviation = jnp.where(seen.is_valid.sum() > 1, deviation, state["deviation"])
        new = {"mean": mean, "deviation": deviation}
        return {name: rate * new[name] + (1 - rate) * state[name] for name in state}

    def target(seen, state):
        length = jnp.clip(jax.lax.stop_gradient(seen.norm), *NORMS)
        v = h * (length - state["mean"]) / (state["deviation"] + 1e-3)
        v = jnp.clip(v, -1, 1)
        angle = jnp.arccos(_inside(seen.cosine)) - margin * v
        angle = jnp.clip(angle, LEAST_ANGLE, jnp.pi - LEAST_ANGLE)
        return jnp.cos(angle) - margin - margin * v

    def others(cosine, seen, state):
        del seen, state
        return _inside(cosine)

    start = {"mean": 20.0, "deviation": 100.0}
    return Margin(scale, target, others, state=start, move=move)


def _inside(cosine):
    return jnp.clip(cosine, -MOST_COSINE, MOST_COSINE)


def _moments(values, is_valid):
    """Mean and unbiased deviation [] of the valid ones of values [B]."""
    count = is_valid.sum().astype(values.dtype)
    mean = jnp.where(is_valid, values, 0).sum() / jnp.maximum(count, 1)
    square = jnp.where(is_valid, jnp.square(values - mean), 0).sum()
    return mean, jnp.sqrt(square / jnp.maximum(count - 1, 1))
