"""Prototypes: the mean of an encoder's features of every class."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax.federated import collections
from fedfr_jax.federated.means import over_examples
from fedfr_jax.types import Batch, Client, Model, PyTree

TINY = 1e-12


class Prototypes(NamedTuple):
    """One set; a class of count 0 is not there."""

    mean: jax.Array  # [M, D]
    count: jax.Array  # [M] examples or pixels, perhaps a multiple of their number


def none(model: Model) -> Prototypes:
    """The prototypes of no example, of a model with features."""
    features = features_of(model)
    num_classes = model.embedding_dim
    mean = jnp.zeros((num_classes, features.shape[-1]), jnp.float32)
    return Prototypes(mean, jnp.zeros(num_classes, jnp.float32))


def features_of(model: Model) -> jax.ShapeDtypeStruct:
    """The shape of a model's features of one image, [1, D] or [1, h, w, D]."""
    image = jax.ShapeDtypeStruct((1, *model.image_shape), jnp.float32)
    of = lambda key, x: model.features(model.init(key), x, False)[1]
    return jax.eval_shape(of, jax.random.key(0), image)


def moved(old: Prototypes, new: Prototypes, momentum: float) -> Prototypes:
    """momentum old + (1 - momentum) new, or the one that has the class at all."""
    kept = jnp.where(old.count > 0, momentum, 0).astype(old.mean.dtype)[:, None]
    is_new = new.count > 0
    mean = jnp.where(is_new[:, None], kept * old.mean + (1 - kept) * new.mean, old.mean)
    return Prototypes(mean, jnp.where(is_new, new.count, old.count))


def nearest(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Values [B, h, w, ...] for a map of features, picked from values of every pixel.

    The pixel at i H // h stands for row i, as in PyTorch's nearest interpolation.

    Args:
      x: [B, H, W, ...]; of features of whole images [B, ...], which is returned.
      shape: of the features, [B, h, w, D] or [B, D].
    """
    for axis in range(1, len(shape) - 1):
        size, fewer = x.shape[axis], shape[axis]
        places = jnp.arange(fewer, dtype=jnp.int32) * size // fewer
        x = jnp.take(x, places, axis=axis)
    return x


def class_means(
    features: jax.Array, labels: jax.Array, is_valid: jax.Array, num_classes: int
) -> tuple[jax.Array, jax.Array]:
    """Means over a batch's valid examples of the features of a class, 0 in the others.

    Args:
      features: [B, D], or [B, h, w, D].
      labels: [B], or [B, H, W]; those outside [0, M) count for no class.
      is_valid: [B] bool.

    Returns:
      (sum of features [M, D], number [M]), both divided by the valid examples.
    """
    labels = nearest(labels.astype(jnp.int32), features.shape)
    is_valid = is_valid.reshape(-1, *[1] * (labels.ndim - 1))
    counts = ((labels >= 0) & (labels < num_classes) & is_valid).reshape(-1)
    rows = features.reshape(-1, features.shape[-1])
    rows = jnp.where(counts[:, None], rows, 0)
    # A product and no scatter, which adds up in no fixed order on a GPU.
    labels = jnp.where(counts, labels.reshape(-1), -1)
    member = jax.nn.one_hot(labels, num_classes, axis=0, dtype=rows.dtype)
    sums = jnp.matmul(member, rows, precision="highest")
    examples = jnp.maximum(is_valid.sum(), 1).astype(rows.dtype)
    return sums / examples, member.sum(1) / examples


def of_class(sums: jax.Array, number: jax.Array) -> Prototypes:
    """Prototypes of sums [M, D] over so many [M] features; zeros for no feature."""
    is_there = number[:, None] > 0
    mean = sums / jnp.where(is_there, number[:, None], 1)
    return Prototypes(jnp.where(is_there, mean, 0), number)


def class_values(features: Callable, num_classes: int, normalize: bool) -> Callable:
    """(variables, batch, key) -> `class_means` of a batch, in evaluation mode.

    Args:
      features: of a `Model`.
      normalize: take the features at unit length.
    """

    def values(variables: PyTree, batch: Batch, key: jax.Array):
        del key
        network = collections.merged(variables)
        _, found, _ = features(network, batch.inputs["image"], False)
        if normalize:
            length = jnp.linalg.norm(found, axis=-1, keepdims=True)
            found = found / jnp.maximum(length, TINY)
        labels = batch.targets.get("mask", batch.targets["label"])
        return class_means(found, labels, batch.is_valid, num_classes)

    return values


def of_client(values: Callable, variables: PyTree, client: Client) -> Prototypes:
    """A client's prototypes over all of its examples, in plain view."""
    of_batch = lambda batch: values(variables, batch, None)
    found = of_class(*over_examples(of_batch, client))
    examples = (client.num_local + client.num_extra).astype(found.count.dtype)
    return found._replace(count=found.count * examples)
