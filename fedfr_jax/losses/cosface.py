"""CosFace: a margin on the cosine of the true class.

Wang et al. 2018, https://arxiv.org/abs/1801.09414, equation 4.
"""

from fedfr_jax.losses.contract import Margin


def cosface(*, scale: float = 64.0, margin: float = 0.4) -> Margin:
    """Logits scale * (cosine - margin at the label).

    Args:
      scale: inverse temperature, positive.
      margin: subtracted from the cosine of the true class.
    """

    def target(seen, state):
        del state
        return seen.cosine - margin

    return Margin(scale, target)
