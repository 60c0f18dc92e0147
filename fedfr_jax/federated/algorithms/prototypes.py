"""Class prototypes (mean features per class) and their margins.

The displacement of a set P from a set Q is, per class c, the distance of P_c to Q_c.
The margin of a set P against a set Q is, per class c, the distance of P_c to the
nearest other class of Q minus its distance to Q_c: the hypothesis margin of Crammer et
al. 2002, "Margin analysis of the LVQ algorithm", without its factor 1/2.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax.convolutions import fast
from fedfr_jax.federated import variable_split
from fedfr_jax.federated.aggregation.mean import to_float32
from fedfr_jax.federated.dataset_means import over_examples
from fedfr_jax.losses.masked_means import masked_mean
from fedfr_jax.types import Batch, Client, Model, PyTree, input_structs

TINY = 1e-12


class Prototypes(NamedTuple):
    """Prototypes of all classes; a class with number 0 is missing."""

    mean: jax.Array  # [M, D]
    number: jax.Array  # [M] examples or pixels, perhaps a multiple of their number


def empty_prototypes(model: Model) -> Prototypes:
    """Prototypes without any example, for a model with features."""
    num_classes, dim = model.embedding_dim, class_features(model).shape[-1]
    return Prototypes(jnp.zeros((num_classes, dim)), jnp.zeros(num_classes))


def class_features(model: Model) -> jax.ShapeDtypeStruct:
    """Shape of a model's features of one image, [1, D] or [1, h, w, D]."""
    features = lambda key, x: model.features(model.init(key), x, False)[1]
    image = input_structs(model.input_shape)
    return jax.eval_shape(features, jax.random.key(0), image)


def update_prototypes(old: Prototypes, new: Prototypes, momentum: float) -> Prototypes:
    """Moving average momentum old + (1 - momentum) new, where both are there."""
    old_share = jnp.where(old.number > 0, momentum, 0).astype(old.mean.dtype)[:, None]
    is_new = new.number > 0
    moved = old_share * old.mean + (1 - old_share) * new.mean
    mean = jnp.where(is_new[:, None], moved, old.mean)
    return Prototypes(mean, jnp.where(is_new, new.number, old.number))


def nearest_prototype(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Downsample values of every pixel to the size of a feature map, [B, h, w, ...].

    The pixel at i H // h is taken for row i, as in PyTorch's nearest interpolation.

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
    """Mean features of each class over a batch's valid examples, 0 for missing classes.

    Args:
      features: [B, D], or [B, h, w, D].
      labels: [B], or [B, H, W]; those outside [0, M) count for no class.
      is_valid: [B] bool.

    Returns:
      (sum of features [M, D], number [M]), both divided by the valid examples.
    """
    labels = nearest_prototype(labels.astype(jnp.int32), features.shape)
    is_valid = is_valid.reshape(-1, *[1] * (labels.ndim - 1))
    counts = ((labels >= 0) & (labels < num_classes) & is_valid).reshape(-1)
    rows = features.reshape(-1, features.shape[-1])
    rows = jnp.where(counts[:, None], rows, 0)
    # A matrix product, as a scatter adds up in no fixed order on a GPU.
    labels = jnp.where(counts, labels.reshape(-1), -1)
    member = jax.nn.one_hot(labels, num_classes, axis=0, dtype=rows.dtype)
    sums = jnp.matmul(member, rows, precision="highest")
    examples = jnp.maximum(is_valid.sum(), 1).astype(rows.dtype)
    return sums / examples, member.sum(1) / examples


def prototype_of_class(sums: jax.Array, number: jax.Array) -> Prototypes:
    """Prototypes from sums [M, D] over `number` [M] features; zeros for no feature."""
    is_there = number[:, None] > 0
    mean = sums / jnp.where(is_there, number[:, None], 1)
    return Prototypes(jnp.where(is_there, mean, 0), number)


def class_values(model: Model, normalize: bool) -> Callable:
    """Build (variables, batch, key) -> `class_means` of a batch, in evaluation mode.

    Args:
      normalize: take the features at unit length.
    """

    def values(variables: PyTree, batch: Batch, key: jax.Array):
        del key
        network = variable_split.whole_variables(variables)
        rows = to_float32(fast(model.features)(network, batch.model_inputs, False)[1])
        if normalize:
            length = jnp.linalg.norm(rows, axis=-1, keepdims=True)
            rows = rows / jnp.maximum(length, TINY)
        labels = batch.targets.get("mask", batch.targets["label"])
        return class_means(rows, labels, batch.is_valid, model.embedding_dim)

    return values


def client_prototypes(
    values: Callable, variables: PyTree, client: Client
) -> Prototypes:
    """Prototypes of all examples of a client, without random augmentation."""
    batch_value = lambda batch: values(variables, batch, None)
    prototypes = prototype_of_class(*over_examples(batch_value, client))
    examples = (client.num_examples + client.num_added).astype(prototypes.number.dtype)
    return prototypes._replace(number=prototypes.number * examples)


def mean_margin(p: Prototypes, q: Prototypes) -> jax.Array:
    """Mean margin of the classes of p against q, []; 0 if there is none.

    A class has a margin where both have the class, and q another one.
    """
    pairs = jnp.linalg.norm(p.mean[:, None] - q.mean[None], axis=-1)
    is_other = (q.number > 0)[None] & ~jnp.eye(len(pairs), dtype=bool)
    is_defined = (p.number > 0) & (q.number > 0) & is_other.any(1)
    to_other = jnp.where(is_other, pairs, jnp.inf).min(1)
    return masked_mean(to_other - jnp.diag(pairs), is_defined)


def mean_displacement(p: Prototypes, q: Prototypes) -> jax.Array:
    """Mean distance of p_c to q_c over the classes that both have, []; 0 for none."""
    is_there = (p.number > 0) & (q.number > 0)
    return masked_mean(jnp.linalg.norm(p.mean - q.mean, axis=-1), is_there)


def aggregate_mean_margin(p: Prototypes) -> jax.Array:
    """Mean distance of a prototype to the nearest other one, [] (AMM)."""
    return mean_margin(p, p)
