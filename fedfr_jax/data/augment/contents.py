"""What an example holds, and how its parts are changed.

inputs:  {"image": [H, W, C] uint8 or float, perhaps "landmarks": [P, 2] x, y pixels,
          perhaps "clean": the image without what `face_mask` has put on it}
targets: {"label": [] int32, perhaps "mask": [H, W] int}
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.types import PyTree


def change_image(inputs: PyTree, image: Callable) -> PyTree:
    """`inputs` with the image [H, W, C] changed by image(image), and "clean" too."""
    chex.assert_rank(inputs["image"], 3)
    names = [name for name in ("image", "clean") if name in inputs]
    return {**inputs, **{name: image(inputs[name]) for name in names}}


def move(
    inputs: PyTree,
    targets: PyTree,
    *,
    image: Callable,
    landmarks: Callable,
    mask: Callable,
) -> tuple[PyTree, PyTree]:
    """Move image [H, W, C], landmarks [P, 2] and mask [H, W], those that there are.

    Args:
      image, landmarks, mask: each takes the old value and returns the new one.
    """
    inputs = change_image(inputs, image)
    if "landmarks" in inputs:
        chex.assert_shape(inputs["landmarks"], (None, 2))
        inputs["landmarks"] = landmarks(inputs["landmarks"])
    if "mask" in targets:
        chex.assert_shape(targets["mask"], inputs["image"].shape[:2])
        targets = {**targets, "mask": mask(targets["mask"])}
    return inputs, targets


def store(values: jax.Array, dtype: Any) -> jax.Array:
    """Float values [...] as `dtype`: rounded and clipped where it holds integers."""
    if jnp.issubdtype(dtype, jnp.integer):
        bounds = jnp.iinfo(dtype)
        values = jnp.clip(jnp.round(values), bounds.min, bounds.max)
    return values.astype(dtype)


def constant(what: str, value: float, dtype: Any) -> np.ndarray:
    """A setting as a scalar of `dtype`, or ValueError when it does not fit."""
    if jnp.issubdtype(dtype, jnp.integer):
        bounds = jnp.iinfo(dtype)
        if not bounds.min <= value <= bounds.max:
            raise ValueError(
                f"{what} must lie in [{bounds.min}, {bounds.max}] for {dtype}, "
                f"got {value}."
            )
    return np.asarray(value, dtype)
