"""Pictures, what may happen to them, and how outcomes are compared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from fedfr_jax.data.augment import (
    affine,
    color_jitter,
    horizontal_flip,
    identity,
    normalize,
    pad_and_crop,
    random_erasing,
)

WARP = {"degrees": 20, "scale": 0.2, "translate": 0.1, "shear": 10}
MOVING = {
    "affine": affine(**WARP),
    "horizontal_flip": horizontal_flip(),
    "mirror_always": horizontal_flip(probability=1),
    "pad_and_crop": pad_and_crop(padding=3),
}
PAINTING = {
    "color_jitter": color_jitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
    "random_erasing": random_erasing(),
    "erase_mean": random_erasing(fill="mean"),
    "erase_seven": random_erasing(fill=7),
    "identity": identity(),
    "normalize": normalize(),
}
ALL = MOVING | PAINTING


def batched(augment, keys, inputs, targets):
    """Apply an augment to every example of a batch.

    Args:
      keys: [B], may be None when augment.views is 1.
      inputs, targets: what `Augment` takes, with [B] in front of every shape.

    Returns:
      (inputs, targets), the same.
    """
    if augment.num_views == 1:
        return jax.vmap(lambda *example: augment.apply(None, *example))(inputs, targets)
    return jax.vmap(augment.apply)(keys, inputs, targets)


def picture(shape=(12, 16, 3), seed=0):
    """Random bytes of a shape."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def keys(count, seed=0):
    return random.split(random.key(seed), count)


def images_of(augment, image, count=1, seed=0):
    """`count` outcomes [count, H, W, C] for one image."""
    run = jax.jit(functools.partial(batched, augment))
    inputs = {"image": jnp.broadcast_to(jnp.asarray(image), (count, *image.shape))}
    return np.asarray(run(keys(count, seed), inputs, {})[0]["image"])


def examples(count, shape=(12, 16, 3), dtype=np.uint8):
    """Inputs and targets of a batch with everything that an example may hold."""
    rng = np.random.default_rng(1)
    size = np.array([shape[1] - 1, shape[0] - 1])
    points = rng.uniform(0, 1, (count, 5, 2)) * size
    inputs = {
        "image": jnp.asarray(picture((count, *shape)).astype(dtype)),
        "landmarks": jnp.asarray(points.astype(np.float32)),
    }
    targets = {
        "label": jnp.arange(count, dtype=jnp.int32),
        "mask": jnp.asarray(rng.integers(0, 9, (count, *shape[:2]), dtype=np.uint8)),
    }
    return inputs, targets


def assert_near(first, second):
    """Equal but for a byte that is rounded the other way in another program."""
    assert first.dtype == second.dtype
    atol = 1.01 if first.dtype == np.uint8 else 1e-4
    np.testing.assert_allclose(np.float32(first), np.float32(second), atol=atol)
