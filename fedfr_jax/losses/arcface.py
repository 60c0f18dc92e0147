"""ArcFace: a margin on the angle to the true class.

Deng et al. 2019, https://arxiv.org/abs/1801.07698, equation 3. Deviation: their first
code falls back to another margin when angle + margin passes pi. Like the later released
code, this one does not: the logit is cos(angle + margin) everywhere, hence not monotone
there.
"""

import jax

from fedfr_jax.losses.contract import Margin
from fedfr_jax.losses.margin import add_angle


def arcface(*, scale: float = 64.0, margin: float = 0.5) -> Margin:
    """Logits scale * cos(angle + margin at the label), exact gradient.

    d logit / d cosine of the label is scale * sin(angle + margin) / sin(angle), which
    is unbounded near cosine = +-1. At +-1 itself, where the direction of the gradient
    is undefined, scale * cos(margin) is used.

    Args:
      scale: inverse temperature, positive.
      margin: added to the angle of the true class, radians.
    """

    def target(seen, state):
        del state
        return add_angle(seen.cosine, margin)

    return Margin(scale, target)


def arcface_straight_through(*, scale: float = 64.0, margin: float = 0.5) -> Margin:
    """ArcFace logits whose gradient ignores the margin.

    The widely used released code computes the margin in place outside automatic
    differentiation, so d logit / d cosine = scale for every entry, the label included.
    The values equal those of `arcface`, the training trajectory does not.

    Args:
      scale: inverse temperature, positive.
      margin: added to the angle of the true class, radians.
    """

    def target(seen, state):
        del state
        step = add_angle(seen.cosine, margin) - seen.cosine
        return seen.cosine + jax.lax.stop_gradient(step)

    return Margin(scale, target)
