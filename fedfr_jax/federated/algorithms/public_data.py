"""Public images that the server and every client have.

They are passed to a round in `Prepared.shared`, so that they are not constants of the
compiled program. Their order and augmentation are a function of (seed, round, step): in
a round all networks see the same batches.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.data.batching import Batching
from fedfr_jax.data.permutation import permute
from fedfr_jax.types import Model, PyTree

TINY = 1e-12  # least length that is scaled to one


class PublicImages(NamedTuple):
    """The images, and how batches are made of them."""

    images: np.ndarray  # [G, H, W, C] as stored, on the host
    batching: Batching  # its batch size is b
    seed: int = 0

    @property
    def num_batches(self) -> int:
        """Number of batches in a pass; the last one is padded from the start."""
        return -(-len(self.images) // self.batching.batch_size)

    def batch(self, images, round, step) -> tuple[jax.Array, jax.Array]:
        """Batch of a step: (augmented images [b, H, W, C], whether each is valid [b]).

        Args:
          images: [G, H, W, C] on the device.
          round, step: [] int32, the step in [0, S).
        """
        key = jax.random.fold_in(jax.random.key(self.seed), round)
        order_key, augment_key = jax.random.split(key)
        word = jax.random.bits(order_key, dtype=jnp.uint32)
        images = jnp.asarray(images)
        count = len(images)
        number = jnp.arange(self.batching.batch_size, dtype=jnp.int32)
        place = step * self.batching.batch_size + number
        row = permute(word, jax.lax.rem(place, jnp.int32(count)), jnp.int32(count))
        stored = {"image": images[row]}, {"label": jnp.zeros_like(row)}
        inputs, _, _ = self.batching.augment_batch(augment_key, step, number, *stored)
        return inputs["image"], place < count


def check_public_images(model: Model, shared: PublicImages) -> None:
    """Raise ValueError for a model without features, or images of a wrong shape."""
    if model.apply_with_features is None:
        raise ValueError("the model must have features, got one without.")
    if shared.images.shape[1:] != tuple(model.input_shape) or not len(shared.images):
        raise ValueError(
            f"shared images must be [G, {', '.join(map(str, model.input_shape))}], got "
            f"{shared.images.shape}."
        )


def features_of_images(
    model: Model,
    shared: PublicImages,
    *,
    train_mode: bool = False,
    normalize: bool = False,
) -> Callable:
    """Build the function that computes a model's features of the public images.

    Args:
      train_mode: dropout, and statistics of the batch.
      normalize: features at unit length.

    Returns:
      (variables, images [G, H, W, C], round, step, key) -> features [b, D].
    """

    def features(variables: PyTree, images, round, step, key):
        x, _ = shared.batch(images, round, step)
        key = jax.random.fold_in(key, step) if train_mode else None
        _, values, _ = model.apply_with_features(variables, x, train_mode, key=key)
        if normalize:
            length = jnp.linalg.norm(values, axis=-1, keepdims=True)
            values = values / jnp.maximum(length, TINY)
        return values

    return features
