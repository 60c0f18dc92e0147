"""MagFace: longer features get a larger margin, and are pulled to be long.

Meng et al. 2021, https://arxiv.org/abs/2103.06627, equations 4 to 6, and the released
code. The gradient flows through the length, in the margin and in the penalty, and is 0
along the feature where its length is outside the bounds.
"""

import math

import jax.numpy as jnp

from fedfr_jax.losses.contract import Margin
from fedfr_jax.losses.margin import add_angle
from fedfr_jax.schema import POSITIVE, check_ranges


def magface(
    *,
    scale: float = 64.0,
    margin: float = 0.45,
    most_margin: float = 0.8,
    least_norm: float = 10.0,
    most_norm: float = 110.0,
    penalty: float = 35.0,
    easy: bool = True,
) -> Margin:
    """Logits scale * cos(angle + m(length) at the label), m linear in the length.

    The loss has penalty * (length / most_norm^2 + 1 / length) added, which falls up to
    most_norm.

    Args:
      scale: inverse temperature, positive.
      margin: radians, at a length of `least_norm`.
      most_margin: radians, at a length of `most_norm`; at least `margin`.
      least_norm: shorter features count as this long; positive.
      most_norm: longer features count as this long.
      penalty: weight of the pull, at least 0.
      easy: no margin where the cosine is not positive; otherwise cosine - m sin(m)
        where angle + m passes pi.

    Raises:
      ValueError: when margins or lengths are out of order, or the penalty is negative.
    """
    given = {"most_margin": most_margin, "most_norm": most_norm, "penalty": penalty}
    bounds = {
        "most_margin": (margin, math.inf),
        "most_norm": (least_norm, math.inf),
        "penalty": (0, math.inf),
        "least_norm": POSITIVE,
    }
    check_ranges("margin_options.", {**given, "least_norm": least_norm}, bounds)
    if most_norm == least_norm:
        raise ValueError(
            f"margin_options.most_norm must be above least_norm, got {most_norm} twice."
        )
    slope = (most_margin - margin) / (most_norm - least_norm)

    def target(seen, state):
        del state
        length = jnp.clip(seen.norm, least_norm, most_norm)
        m = margin + slope * (length - least_norm)
        added = add_angle(seen.cosine, m)
        if easy:
            return jnp.where(seen.cosine > 0, added, seen.cosine)
        below = seen.cosine - m * jnp.sin(m)
        return jnp.where(seen.cosine > -jnp.cos(m), added, below)

    def pull(norm):
        length = jnp.clip(norm, least_norm, most_norm)
        return penalty * (length / most_norm**2 + 1 / length)

    return Margin(scale, target, penalty=pull)
