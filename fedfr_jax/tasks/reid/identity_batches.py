"""Batches of P identities with Q images each, for methods with `identities_per_batch`.

Hermans, Beyer, Leibe 2017, arXiv:1703.07737, section 2; the rule is that of torchreid's
RandomIdentitySampler (Zhou and Xiang 2019, arXiv:1910.10093), which Bag of Tricks uses
too. Made on the host: which identities are left depends on all batches before.
"""

from collections.abc import Callable, Iterator

import numpy as np

from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.algorithms.host_batches import with_host_batches
from fedfr_jax.tasks.reid.data import ReidSplit
from fedfr_jax.types import Algorithm


def one_pass(
    labels: np.ndarray, rng: np.random.Generator, *, identities: int, images: int
) -> Iterator[np.ndarray]:
    """Sample the batches [P * Q] of one pass, rows of `labels` [n]; their number
    varies.

    The images of an identity are shuffled and cut into groups of Q, whose rest is left
    out; one that has fewer than Q gives a group drawn with replacement. While P
    identities have groups left, P of them are drawn uniformly and give a group each.
    """
    groups = {}
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        if len(rows) < images:
            groups[label] = [rng.choice(rows, images)]
        else:
            rows = rng.permutation(rows)[: len(rows) // images * images]
            groups[label] = list(rows.reshape(-1, images))
    left = np.array([*groups])
    while len(left) >= identities:
        chosen = rng.choice(left, identities, replace=False)
        yield np.concatenate([groups[label].pop() for label in chosen])
        left = np.array([label for label in left if groups[label]])


def identity_batches(
    labels: np.ndarray,
    rng: np.random.Generator,
    *,
    identities: int,
    images: int,
    count: int,
) -> np.ndarray:
    """Sample the first `count` batches of repeated passes, [count, P * Q] int32 rows.

    Args:
      labels: [n] of at least P identities, see `check_identities`.
      identities, images: P and Q.
    """
    batches = []
    while len(batches) < count:
        batches += one_pass(labels, rng, identities=identities, images=images)
    rows = np.array(batches[:count], np.int32)
    return rows.reshape(count, identities * images)


def check_identities(
    owner: str, labels: np.ndarray, *, identities: int, images: int
) -> None:
    """Raise ValueError unless batches of P identities and Q images are possible.

    Args:
      owner: whose `labels` [n] they are, such as "client 3".
    """
    if identities < 2:
        raise ValueError(f"identities_per_batch must be at least 2, got {identities}.")
    number = len(np.unique(labels))
    if number < identities:
        raise ValueError(
            f"{owner} must have at least the {identities} identities of a batch, got "
            f"{number}."
        )


def images_per_identity(batch_size: int, identities: int) -> int:
    """Images per identity, Q, in a batch with `identities` identities.

    Raises:
      ValueError: when the identities do not divide the batch.
    """
    is_number = isinstance(identities, int) and identities > 0
    if not is_number or batch_size % identities:
        raise ValueError(
            "identities_per_batch must divide batch_size="
            f"{batch_size}, got "
            f"{identities!r}."
        )
    return batch_size // identities


def with_identity_batches(
    algorithm: Algorithm,
    split: ReidSplit,
    feed: Batching,
    *,
    identities: int,
    epochs: int,
    seed: int,
) -> Algorithm:
    """Let an algorithm's clients train on batches balanced over identities.

    An epoch has as many batches as any epoch of the feed, of pass after pass.

    Args:
      epochs: most local epochs of a round.

    Raises:
      ValueError: naming the client, for one with fewer identities than a batch.
    """
    images = images_per_identity(feed.batch_size, identities)
    of_client = np.split(split.labels, split.offsets[1:-1])
    for name, labels in zip(split.client_names, of_client, strict=True):
        check_identities(name, labels, identities=identities, images=images)
    max_images = int(np.diff(split.offsets).max())
    count = max(int(feed.steps_per_epoch(max_images)) * epochs, 1)

    def order(client, round):
        rng = np.random.default_rng((seed, client, round))
        options = {"identities": identities, "images": images, "count": count}
        return identity_batches(of_client[client], rng, **options)

    return with_host_batches(algorithm, order)


def identity_order(labels: np.ndarray, batch_size: int, identities: int) -> Callable:
    """Build `CentralTrainer.batch_order` of balanced batches.

    On several devices a triplet is of the rows of one device, whose part of the batch
    is of whole groups where it is a multiple of Q.

    Args:
      labels: [n] of all training images.
    """
    images = images_per_identity(batch_size, identities)
    check_identities("the data", labels, identities=identities, images=images)
    options = {"identities": identities, "images": images}

    def order(word, steps):
        rng = np.random.default_rng(word)
        return identity_batches(labels, rng, count=steps, **options)

    return order
