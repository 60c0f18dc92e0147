"""Composition of augments; changes of an example's image, landmarks and mask.

An example has

inputs:  {"image": [H, W, C] uint8 or float, perhaps "landmarks": [P, 2] x, y pixels,
          perhaps "clean": the image without the mask of `face_mask`}
targets: {"label": [] int32, perhaps "mask": [H, W] int}
"""

import math
from collections.abc import Callable
from typing import Annotated, Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval
from jax import lax

from fedfr_jax.types import Augment, PyTree

Fill = Annotated[float, Interval(ge=-1e30, le=1e30)]  # of pixels, in their own units


def check_rising(name: str, value: tuple[float, float]) -> None:
    """Raise ValueError unless `value` is (low, high)."""
    if value[0] > value[1]:
        raise ValueError(f"{name} must be (low, high), got {value}.")


def change_image(inputs: PyTree, image: Callable) -> PyTree:
    """Apply image(image) to the image [H, W, C], and to "clean" if there."""
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
    """Change image [H, W, C], landmarks [P, 2] and mask [H, W], as far as present.

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
    """Cast float values [...] to `dtype`; integers are rounded and clipped."""
    if jnp.issubdtype(dtype, jnp.integer):
        bounds = jnp.iinfo(dtype)
        values = jnp.clip(jnp.round(values), bounds.min, bounds.max)
    return values.astype(dtype)


def constant(setting: str, value: float, dtype: Any) -> np.ndarray:
    """Convert a setting to a scalar of `dtype`; raise ValueError if it does not fit."""
    if jnp.issubdtype(dtype, jnp.integer):
        bounds = jnp.iinfo(dtype)
        if not bounds.min <= value <= bounds.max:
            raise ValueError(
                f"{setting} must be in [{bounds.min}, {bounds.max}] for {dtype}, "
                f"got {value}."
            )
    return np.asarray(value, dtype)


def identity() -> Augment:
    """Return the example unchanged."""

    def apply(key, inputs, targets):
        del key
        return inputs, targets

    def view(i, inputs):
        del i
        return inputs

    return Augment(apply, num_views=1, apply_view=view)


def compose(*augments: Augment) -> Augment:
    """Apply augments in order, each with its own key.

    If every augment has countable views, so has the composition: `view` is a number in
    mixed radix, whose first digit is the first augment's view.
    """
    counts = [part.num_views for part in augments]
    has_draw = all(part.sample_view or part.num_views == 1 for part in augments)

    def apply(key, inputs, targets):
        for index, part in enumerate(augments):
            own_key = None if part.num_views == 1 else jax.random.fold_in(key, index)
            inputs, targets = part.apply(own_key, inputs, targets)
        return inputs, targets

    def draw(key):
        number, radix = jnp.int32(0), 1
        for index, part in enumerate(augments):
            if part.num_views > 1 and part.sample_view is not None:
                number += radix * part.sample_view(jax.random.fold_in(key, index))
                radix *= part.num_views
        return number

    def plain(inputs):
        for part in augments:
            inputs = part.apply_deterministic(inputs)
        return inputs

    def view(i, inputs):
        i = jnp.asarray(i, jnp.int32)
        for part in augments:
            count = jnp.int32(part.num_views)
            assert part.apply_view is not None
            inputs = part.apply_view(lax.rem(i, count), inputs)
            i = lax.div(i, count)
        return inputs

    if not all(counts):
        return Augment(apply, deterministic=plain)
    return Augment(apply, math.prod(counts), view, draw if has_draw else None)
