"""Fine-tuning: weights of elsewhere to start from, and leaves that stay."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from fedfr_jax import trees
from fedfr_jax.central.settings import Training
from fedfr_jax.federated.frozen import frozen
from fedfr_jax.federated.packing import unpack
from fedfr_jax.models.foreign import variables_of
from fedfr_jax.models.saved_model import load_weights
from fedfr_jax.schema import naming
from fedfr_jax.stacks import named
from fedfr_jax.types import Local, Model, PyTree


def weights_of(
    central: Mapping[str, Training], model: Mapping, image_shape: Sequence[int]
) -> dict[str, PyTree]:
    """Section -> the backbone that its training starts from, where `init` names one."""
    found = {}
    for section, training in central.items():
        with naming(f"config.{section}.init"):
            found[section] = given_backbone(training.init, model, image_shape)
    return found


def given_backbone(
    init: Any, model: Mapping, image_shape: Sequence[int]
) -> PyTree | None:
    """The variables that `Training.init` names, None where it names none.

    Args:
      init: path of a file of weights or of a run, see `load_weights`.
      model: the config's section.

    Raises:
      ValueError: when they do not fit the network: says which leaf.
    """
    if init is None:
        return None
    return variables_of(load_weights(init), model, image_shape)


def with_frozen(local: Local, model: Model, pattern: str) -> Local:
    """`local` that does not move the leaves of the backbone that `pattern` finds.

    Args:
      pattern: regular expression over paths such as params/backbone/stem/conv/kernel;
        empty for none. Running statistics move all the same.

    Raises:
      ValueError: when it finds none.
    """
    if not pattern:
        return local
    leaves = lambda key: named(unpack(model.init(key)["params"]))
    shapes = jax.eval_shape(leaves, jax.random.key(0))
    trees.matching(pattern)({"params": {"backbone": shapes}})
    return frozen(local, pattern)
