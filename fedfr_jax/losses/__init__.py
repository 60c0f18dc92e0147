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

from collections.abc import Callable

from fedfr_jax.losses.margin_losses import (
    adaface,
    arcface,
    arcface_straight_through,
    class_hinge,
    cosface,
    curricularface,
    elasticface,
    magface,
    sphereface2,
    uniface,
)
from fedfr_jax.losses.masked_means import masked_mean
from fedfr_jax.schema import register

LOSSES = {
    "adaface": adaface,
    "arcface": arcface,
    "arcface_straight_through": arcface_straight_through,
    "class_hinge": class_hinge,
    "cosface": cosface,
    "curricularface": curricularface,
    "elasticface": elasticface,
    "magface": magface,
    "sphereface2": sphereface2,
    "uniface": uniface,
}

__all__ = [
    "LOSSES",
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
