"""Losses of one client, one number per example, so that the caller masks and averages.

`LOSSES` names the margins a configuration can choose between; all have the signature
(cosine [B, M], labels [B], *, scale, margin) -> logits [B, M]. The other losses compare
different things and are imported from their modules.
"""

from fedfr_jax.losses.binary import CONVERTERS
from fedfr_jax.losses.margin import arcface, arcface_straight_through, cosface

LOSSES = {
    "arcface": arcface,
    "arcface_straight_through": arcface_straight_through,
    "cosface": cosface,
}

__all__ = ["CONVERTERS", "LOSSES"]
