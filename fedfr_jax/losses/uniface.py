"""UniFace: one learned threshold between every true cosine and every other one.

Zhou et al. 2023, "UniFace: Unified Cross-Entropy Loss for Deep Face Recognition",
ICCV 2023, equation 9, and the released code. Deviation: softplus in place of
log(1 + e^x).
"""

import math

import jax.numpy as jnp

from fedfr_jax.losses.binary import binary_cross_entropy
from fedfr_jax.losses.contract import Margin
from fedfr_jax.schema import check_ranges


def uniface(
    *, scale: float = 64.0, margin: float = 0.4, negative_weight: float = 1.0
) -> Margin:
    """A binary cross entropy of every class, of scale * cosine - bias.

    The bias is the threshold, the same for all classes; it is learned and starts at
    log(10 M). What is above `scale` counts as `scale`, without gradient.

    Args:
      scale: positive.
      margin: subtracted from the cosine of the true class.
      negative_weight: of the other classes' sum, at least 0; the paper's l.

    Raises:
      ValueError: for a negative weight below 0.
    """
    given = {"negative_weight": negative_weight}
    check_ranges("margin_options.", given, {"negative_weight": (0, math.inf)})

    def target(seen, state):
        del state
        return seen.cosine - margin

    def classify(logits, labels, class_mask, params):
        above = logits - jnp.reshape(params["bias"], (1, -1)).astype(logits.dtype)
        return binary_cross_entropy(
            jnp.clip(above, -scale, scale),
            labels,
            class_mask,
            weights=(1.0, negative_weight),
        )

    start = lambda num_classes: {"bias": jnp.float32(math.log(10 * num_classes))}
    return Margin(scale, target, params=start, classify=classify)
