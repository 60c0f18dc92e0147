"""Losses: one value per example, which the caller masks and averages.

`LOSSES` are the choices of the key `loss` of a method. The library's are margin losses,
factories (*, scale, margin, ...) -> `contract.Margin`. A loss on outputs can be added:
(*, ...) -> loss(outputs [N, M], targets [N] int32) -> [N], a number for every example
or pixel, as in optax. All other losses are imported from their modules.

Unless a margin loss says otherwise:

Args:
  scale: inverse temperature of the cosines.
  margin: of the true class, added to its angle (radians) or subtracted from its cosine.
"""

from collections.abc import Callable, Mapping

from fedfr_jax.losses.binary import CONVERTERS
from fedfr_jax.losses.contract import Margin
from fedfr_jax.losses.margin_losses import (
    adaface,
    arcface,
    arcface_straight_through,
    cosface,
    curricularface,
    elasticface,
    magface,
    sphereface2,
    uniface,
)
from fedfr_jax.losses.masked_means import masked_mean
from fedfr_jax.parts import call
from fedfr_jax.schema import check_choice, kinds_of, register

LOSSES = {
    "adaface": adaface,
    "arcface": arcface,
    "arcface_straight_through": arcface_straight_through,
    "cosface": cosface,
    "curricularface": curricularface,
    "elasticface": elasticface,
    "magface": magface,
    "sphereface2": sphereface2,
    "uniface": uniface,
}

__all__ = [
    "CONVERTERS",
    "LOSSES",
    "build_margin",
    "masked_mean",
    "register_loss",
]


def register_loss(name: str, loss: Callable) -> None:
    """Register a loss; its keyword arguments are its settings in configs.

    Args:
      loss: (*, scale, margin, ...) -> Margin, for methods of faces; or
        (*, ...) -> (outputs [N, M], targets [N]) -> [N], for methods of classification
        (of N examples) and segmentation (of N pixels).
    """
    register(LOSSES, "loss", name, loss)


def build_margin(settings: Mapping) -> Margin:
    """Build a margin loss of LOSSES from {"name": ..., settings}."""
    settings = dict(settings)
    name = settings.pop("name", None)
    check_choice("loss", name, LOSSES)
    if not {"scale", "margin"} <= kinds_of(LOSSES[name]).keys():
        raise ValueError(
            f"loss must be a margin loss on cosines, got {name!r}, a loss on logits."
        )
    return call("loss", LOSSES[name], settings)
