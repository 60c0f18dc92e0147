"""ElasticFace: margins drawn anew for every example.

Boutros et al. 2022, https://arxiv.org/abs/2109.09416, equations 4 to 7. The "plus"
variants hand out a batch's margins in the order of its cosines. Deviation: the released
code sorts the margins and then indexes them with the order of the cosines, where it
means to give the k-th smallest margin to the example with the k-th largest cosine, as
happens here.
"""

import math

import jax
import jax.numpy as jnp

from fedfr_jax.losses.contract import Margin
from fedfr_jax.losses.margin import add_angle
from fedfr_jax.schema import check_choice, check_ranges

ON = ("angle", "cosine")


def elasticface(
    *,
    scale: float = 64.0,
    margin: float = 0.5,
    std: float = 0.05,
    on: str = "angle",
    plus: bool = False,
) -> Margin:
    """ArcFace or CosFace logits with margins of N(margin, std^2), one per example.

    Args:
      scale: inverse temperature, positive.
      margin: mean of the margins; the paper has 0.5 on the angle, 0.35 on the cosine.
      std: their deviation, at least 0; the paper has 0.05, with `plus` 0.0175 on the
        angle and 0.025 on the cosine.
      on: angle (ElasticFace-Arc) or cosine (ElasticFace-Cos).
      plus: the larger an example's cosine, the smaller its margin.

    Raises:
      ValueError: for an unknown `on` or a negative deviation.
    """
    check_choice("margin_options.on", on, ON)
    check_ranges("margin_options.", {"std": std}, {"std": (0, math.inf)})

    def target(seen, state):
        del state
        margins = margin + std * draw(seen)
        if plus:
            margins = in_order(margins, seen)
        if on == "angle":
            return add_angle(seen.cosine, margins)
        return seen.cosine - margins

    return Margin(scale, target)


def draw(seen):
    """Normal numbers [B] of the step's key.

    Raises:
      ValueError: without a key.
    """
    if seen.key is None:
        raise ValueError("key must be given to a loss that draws margins, got None.")
    return jax.random.normal(seen.key, seen.cosine.shape, seen.cosine.dtype)


def in_order(margins, seen):
    """Margins [B], the smallest for the largest cosine; padding gets what is left."""
    cosine = jnp.where(seen.is_valid, seen.cosine, -jnp.inf)
    rank = jnp.argsort(jnp.argsort(-jax.lax.stop_gradient(cosine)))
    return jnp.sort(margins)[rank]
