"""Batches of P identities with as many images each: the key `identities` of rows."""

from collections.abc import Callable

import numpy as np

from fedfr_jax.data.identity_batches import check_identities, identity_batches
from fedfr_jax.federated.algorithms.ordered import ordered
from fedfr_jax.feed import Feed
from fedfr_jax.tasks.reid.data import ReidSplit
from fedfr_jax.types import Algorithm


def images_of(batch_size: int, identities: int) -> int:
    """Q of a batch of so many identities.

    Raises:
      ValueError: when the identities do not divide the batch.
    """
    is_number = isinstance(identities, int) and identities > 0
    if not is_number or batch_size % identities:
        raise ValueError(
            f"identities must be a number that divides the batch of {batch_size}, got "
            f"{identities!r}."
        )
    return batch_size // identities


def balanced(
    algorithm: Algorithm,
    split: ReidSplit,
    feed: Feed,
    *,
    identities: int,
    epochs: int,
    seed: int,
) -> Algorithm:
    """`algorithm` whose clients' batches are balanced over identities.

    An epoch has as many batches as any epoch of the feed, of pass after pass.

    Args:
      epochs: most local epochs of a round.

    Raises:
      ValueError: naming the client, for one with fewer identities than a batch.
    """
    images = images_of(feed.batch_size, identities)
    of_client = np.split(split.labels, split.offsets[1:-1])
    for name, labels in zip(split.client_names, of_client, strict=True):
        check_identities(name, labels, identities=identities, images=images)
    most = int(np.diff(split.offsets).max())
    count = max(int(feed.steps_per_epoch(most)) * epochs, 1)

    def order(client, round):
        rng = np.random.default_rng((seed, client, round))
        given = {"identities": identities, "images": images, "count": count}
        return identity_batches(of_client[client], rng, **given)

    return ordered(algorithm, order)


def central_order(labels: np.ndarray, batch_size: int, identities: int) -> Callable:
    """`Central.order` of balanced batches.

    On several devices a triplet is of the rows of one device, whose part of the batch
    is of whole groups where it is a multiple of Q.

    Args:
      labels: [n] of all training images.
    """
    images = images_of(batch_size, identities)
    check_identities("the data", labels, identities=identities, images=images)
    given = {"identities": identities, "images": images}

    def order(word, steps):
        rng = np.random.default_rng(word)
        return identity_batches(labels, rng, count=steps, **given)

    return order
