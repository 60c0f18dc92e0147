"""The config's network, tried on the shape of an image before anything is trained."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from fedfr_jax.models import MODELS
from fedfr_jax.schema import choose, naming
from fedfr_jax.types import Model

NAMES = {"reid": "reid", "segmentation": "segmenter"}  # of tasks with a usual network


def with_name(task: str, settings: Mapping) -> Mapping:
    """config.model with the name of the task's usual network, where it has none."""
    return {"name": NAMES[task], **settings} if task in NAMES else settings


def network_of(
    settings: Mapping, image_shape: Sequence[int]
) -> tuple[Model, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct | None]:
    """(The network of config.model, its output for one image, its features or None).

    Args:
      image_shape: (H, W, C).

    Returns:
      Output and features are shapes with an axis of 1 in front.

    Raises:
      ValueError: for settings that make no network, or one that cannot run.
    """
    model = choose("model", MODELS, settings, image_shape)
    if (size := model.embedding_dim) < 1:
        raise ValueError(f"config.model must give at least a number, got {size}.")
    run = model.features or model.apply
    image = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    with naming("config.model", settings):
        output, *features, _ = jax.eval_shape(
            lambda key, x: run(model.init(key), x, False), jax.random.key(0), image
        )
    return model, output, features[0] if features else None
