"""The config's model, built and traced on an input's shape."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedfr_jax.models import MODELS
from fedfr_jax.ranges import MAX
from fedfr_jax.schema import choose, naming
from fedfr_jax.types import InputShape, Model, PyTree, input_structs

NAMES = {"reid": "reid", "segmentation": "segmenter"}  # of tasks with a usual network


def with_name(task: str, settings: Mapping) -> Mapping:
    """config.model with the task's default name, if it has none."""
    return {"name": NAMES[task], **settings} if task in NAMES else settings


def build_network(
    settings: Mapping, input_shape: InputShape
) -> tuple[Model, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct | None]:
    """Build (model of config.model, its output for one image, its features or None).

    Args:
      input_shape: of one input.

    Returns:
      Output and features are shapes with an axis of 1 in front.

    Raises:
      ValueError: for settings that make no network, or one that cannot run.
    """
    check_dtype(settings.get("dtype"))
    model = choose("model", MODELS, settings, input_shape)._replace(config=settings)
    if (size := model.embedding_dim) < 1:
        raise ValueError(f"config.model must have at least one output, got {size}.")
    run = model.apply_with_features or model.apply
    image = input_structs(input_shape)
    with naming("config.model", settings):
        variables = jax.eval_shape(model.init, jax.random.key(0))
        check_sizes(variables)
        output, *features, _ = jax.eval_shape(
            lambda v, x: run(v, x, False), variables, image
        )
    return model, output, features[0] if features else None


def check_dtype(dtype: Any) -> None:
    """Raise ValueError unless `dtype` is None or the name of a floating dtype."""
    if dtype is None:
        return
    if isinstance(dtype, str | type | jnp.dtype):
        with contextlib.suppress(TypeError, ValueError, SyntaxError):  # NumPy's
            if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
                return
    raise ValueError(
        f"config.model.dtype must be None or the name of a floating dtype, got "
        f"{dtype!r}."
    )


def check_sizes(variables: PyTree) -> None:
    """Raise ValueError for an array with more elements than int32 can count."""
    largest = max(jax.tree.leaves(variables), key=lambda leaf: math.prod(leaf.shape))
    if math.prod(largest.shape) > MAX:
        raise ValueError(
            f"config.model must have arrays of fewer than 2**31 elements, got one of "
            f"shape {largest.shape}."
        )
