"""Initial weights of central training."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedfr_jax.central.settings import Training
from fedfr_jax.models.external_checkpoints import convert_variables
from fedfr_jax.models.saved_model import load_weights
from fedfr_jax.schema import naming
from fedfr_jax.types import PyTree


def load_start_weights(
    central: Mapping[str, Training], model: Mapping, input_shape: Sequence[int]
) -> dict[str, PyTree]:
    """Load the initial backbone of each central training with `init`: {section:
    weights}.
    """
    weights = {}
    for section, training in central.items():
        with naming(f"config.{section}.init"):
            weights[section] = load_backbone(training.init, model, input_shape)
    return weights


def load_backbone(
    init: Any, model: Mapping, input_shape: Sequence[int]
) -> PyTree | None:
    """Load the variables of `Training.init`; None without it.

    Args:
      init: path of a file of weights or of a run, see `load_weights`.
      model: the config's section.

    Raises:
      ValueError: when they do not fit the network: says which leaf.
    """
    if init is None:
        return None
    return convert_variables(load_weights(init), model, input_shape)
