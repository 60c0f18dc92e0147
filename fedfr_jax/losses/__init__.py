"""Losses of one client, one number per example, so that the caller masks and averages.

`LOSSES` names the margins a configuration can choose between; all have the signature
(cosine [B, M], labels [B], *, scale, margin) -> logits [B, M]. The other losses compare
different things and are imported from their modules.
"""

from collections.abc import Callable

from fedfr_jax.losses.binary import CONVERTERS
from fedfr_jax.losses.margin import arcface, arcface_straight_through, cosface
from fedfr_jax.losses.masks import masked_mean
from fedfr_jax.schema import register

LOSSES = {
    "arcface": arcface,
    "arcface_straight_through": arcface_straight_through,
    "cosface": cosface,
}

__all__ = ["CONVERTERS", "LOSSES", "masked_mean", "register_loss"]


def register_loss(name: str, loss: Callable) -> None:
    """Add `loss(cosine, labels, *, scale, margin) -> logits` to LOSSES.

    Raises:
      ValueError: when the name belongs to another loss.
    """
    register(LOSSES, "loss", name, loss)
