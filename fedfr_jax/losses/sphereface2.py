"""SphereFace2: a binary classifier for every class, with one learned bias for all.

Wen et al. 2022, https://arxiv.org/abs/2108.01513, equations 5 to 8, type C: the margin
is on the cosine. Deviation: the gradient flows through the adjustment of the cosine;
the released code stops it there and takes a slope of 1. `binary.binary_branch` is
FedFR's form of it.
"""

import math

import jax.numpy as jnp

from fedfr_jax.losses.binary import binary_cross_entropy, spread_out
from fedfr_jax.losses.contract import Margin
from fedfr_jax.schema import check_ranges


def sphereface2(
    *,
    scale: float = 40.0,
    margin: float = 0.4,
    t: float = 3.0,
    positive_weight: float = 0.7,
    weight: float = 50.0,
) -> Margin:
    """weight / scale times the binary cross entropies of scale * (g(c) -+ margin) + b.

    g(c) = 2 ((c + 1) / 2)^t - 1 for every cosine c; the margin is subtracted for the
    true class and added for the others. The bias b starts where the two weighted sums
    are balanced at c = 0.

    Args:
      scale: r, positive.
      margin: m, of the adjusted cosine.
      t: at least 1; spreads the similarities of wrong classes.
      positive_weight: lambda, of the positive against the negatives, in (0, 1).
      weight: of the whole loss; the released code's `lw`.

    Raises:
      ValueError: for a number out of range.
    """
    given = {"t": t, "positive_weight": positive_weight, "weight": weight}
    bounds = {
        "t": (1, math.inf),
        "positive_weight": (1e-6, 1 - 1e-6),
        "weight": (0, math.inf),
    }
    check_ranges("margin_options.", given, bounds)
    shares = (positive_weight, 1 - positive_weight)

    def target(seen, state):
        del state
        return spread_out(seen.cosine, t) - margin

    def others(cosine, seen, state):
        del seen, state
        return spread_out(cosine, t) + margin

    def classify(logits, labels, class_mask, params):
        logits = logits + jnp.reshape(params["bias"], (1, 1)).astype(logits.dtype)
        losses = binary_cross_entropy(logits, labels, class_mask, weights=shares)
        return weight / scale * losses

    def start(num_classes):
        middle = 2 * 0.5**t - 1
        own, other = scale * (middle - margin), scale * (middle + margin)
        return {"bias": jnp.float32(balanced(own, other, num_classes, *shares))}

    return Margin(scale, target, others, params=start, classify=classify)


def balanced(
    own: float, other: float, num_classes: int, positive: float, negative: float
) -> float:
    """The bias at which weighted positive and negative slopes are equal.

    Args:
      own, other: logits without a bias, of the true and of other classes.
    """
    k = positive / (negative * max(num_classes - 1, 1))
    root = math.sqrt((1 - k) ** 2 + 4 * k * math.exp(own - other))
    return math.log(2 * k) - other - math.log(1 - k + root)
