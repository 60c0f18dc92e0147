"""Losses of one client, one number per example, so that the caller masks and averages.

`LOSSES` names the margins a configuration can choose between; all are factories
(*, scale, margin, ...) -> `contract.Margin`. The other losses compare different things
and are imported from their modules.
"""

import inspect
from collections.abc import Callable, Mapping

from fedfr_jax.losses.adaface import adaface
from fedfr_jax.losses.arcface import arcface, arcface_straight_through
from fedfr_jax.losses.binary import CONVERTERS
from fedfr_jax.losses.contract import Margin
from fedfr_jax.losses.cosface import cosface
from fedfr_jax.losses.curricularface import curricularface
from fedfr_jax.losses.elasticface import elasticface
from fedfr_jax.losses.magface import magface
from fedfr_jax.losses.masks import masked_mean
from fedfr_jax.losses.sphereface2 import sphereface2
from fedfr_jax.losses.uniface import uniface
from fedfr_jax.schema import check_keys, check_kinds, register

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

__all__ = ["CONVERTERS", "LOSSES", "margin_of", "masked_mean", "register_loss"]


def register_loss(name: str, loss: Callable) -> None:
    """Add `loss(*, scale, margin, ...) -> Margin` to LOSSES.

    Raises:
      ValueError: when the name belongs to another loss.
    """
    register(LOSSES, "loss", name, loss)


def margin_of(
    name: str, *, scale: float, margin: float, options: Mapping | None = None
) -> Margin:
    """A member of LOSSES with its settings.

    Args:
      options: further keywords of the member, the config's `margin_options`.

    Raises:
      ValueError: for an unknown name, or an option that the loss does not have, of
        another kind or out of its range.
    """
    if name not in LOSSES:
        raise ValueError(f"margin_loss must be one of {list(LOSSES)}, got {name!r}.")
    options = {} if options is None else options
    parameters = inspect.signature(LOSSES[name]).parameters
    check_keys("margin_options", options, parameters.keys() - {"scale", "margin"})
    check_kinds("margin_options.", options, parameters)
    return LOSSES[name](scale=scale, margin=margin, **options)
