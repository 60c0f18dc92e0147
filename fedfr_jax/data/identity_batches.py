"""Batches of P identities with Q images each, as batch-hard triplets need them.

Hermans, Beyer, Leibe 2017, arXiv:1703.07737, section 2; the rule is that of torchreid's
RandomIdentitySampler (Zhou and Xiang 2019, arXiv:1910.10093), that of Bag of Tricks
too. Made on the host: which identities are left depends on all batches before.
"""

from collections.abc import Iterator

import numpy as np

from fedfr_jax.schema import check_ranges


def one_pass(
    labels: np.ndarray, rng: np.random.Generator, *, identities: int, images: int
) -> Iterator[np.ndarray]:
    """Batches [P * Q] of one pass, rows of `labels` [n]; how many there are is chance.

    The images of an identity are shuffled and cut into groups of Q, whose rest is left
    out; one that has fewer than Q gives a group drawn with replacement. While P
    identities have groups left, P of them are drawn uniformly and give a group each.
    """
    groups = {}
    for label in np.unique(labels):
        own = np.flatnonzero(labels == label)
        if len(own) < images:
            groups[label] = [rng.choice(own, images)]
        else:
            own = rng.permutation(own)[: len(own) // images * images]
            groups[label] = list(own.reshape(-1, images))
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
    """The first `count` batches of pass after pass, [count, P * Q] int32 rows.

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
    what: str, labels: np.ndarray, *, identities: int, images: int
) -> None:
    """Raise ValueError unless batches of P identities and Q images can be made.

    Args:
      what: whose `labels` [n] they are, such as "client 3".
    """
    numbers = {"identities": identities, "images": images}
    check_ranges("", numbers, {"identities": (2, np.inf), "images": (1, np.inf)})
    number = len(np.unique(labels))
    if number < identities:
        raise ValueError(
            f"{what} must have at least the {identities} identities of a batch, got "
            f"{number}."
        )
