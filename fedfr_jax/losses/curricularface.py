"""CurricularFace: other classes that are hard count more and more as training goes on.

Huang et al. 2020, https://arxiv.org/abs/2004.00288, equations 8 to 11, and the released
code. The state is t, the running mean of the cosine with the true class.
"""

import math

import jax.numpy as jnp

from fedfr_jax.losses.contract import Margin
from fedfr_jax.losses.margin import add_angle
from fedfr_jax.losses.masks import masked_mean
from fedfr_jax.schema import check_ranges


def curricularface(
    *, scale: float = 64.0, margin: float = 0.5, rate: float = 0.01
) -> Margin:
    """ArcFace logits; other classes that look more alike than allowed count for more.

    Another class whose cosine c is above cos(angle + margin) of the true class has
    scale * c (t + c).
    Where angle + margin passes pi the true class has scale * (cosine - margin
    sin(margin)), while others are still compared with cos(angle + margin).

    Args:
      scale: inverse temperature, positive.
      margin: added to the angle of the true class, radians.
      rate: weight of a batch's mean cosine in t, in [0, 1].

    Raises:
      ValueError: for a rate out of range.
    """
    check_ranges("margin_options.", {"rate": rate}, {"rate": (0, 1)})

    def move(state, seen):
        mean = masked_mean(jnp.clip(seen.cosine, -1, 1), seen.is_valid)
        return {"t": rate * mean + (1 - rate) * state["t"]}

    def target(seen, state):
        del state
        below = seen.cosine - margin * math.sin(margin)
        is_inside = seen.cosine > -math.cos(margin)
        return jnp.where(is_inside, add_angle(seen.cosine, margin), below)

    def others(cosine, seen, state):
        is_hard = cosine > add_angle(seen.cosine, margin)[:, None]
        return jnp.where(is_hard, cosine * (state["t"] + cosine), cosine)

    return Margin(scale, target, others, state={"t": 0.0}, move=move)
