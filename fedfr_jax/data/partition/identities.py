"""Face partitions: identities of clients, public identities and unseen identities.

`ms1m` is the split of FedFR (Liu et al., "FedFR: Joint Optimization Federated
Framework for Generic and Personalized Face Recognition", AAAI 2022,
https://arxiv.org/abs/2112.12496); `by_identity` makes the same kind of split from a
set of any size. Both return rows of the source and decode nothing.

Deviations: `by_identity` picks each identity's test images with the seed, the paper
takes the first ones of the file; and it sets aside identities that no training sees,
for which the paper has a second data set.

Where images have names, `by_identity` splits them into training and test images by a
hash of name and seed, so that an additional image moves no other. Identities are
ordered by a hash of their names; a new one may move those behind it. With `names` None,
as for sets whose images have no names, the split is sampled by row numbers, and every
additional image changes it.
"""

import random
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from annotated_types import Interval

from fedfr_jax.data.partition.identity_assignment import (
    IdentityNames,
    IdentityPartition,
    IdentityRequest,
    IdentitySplit,
    assemble,
    check_labels,
    client_sizes,
    draw_identities,
    group,
    name_keys,
)
from fedfr_jax.ranges import MAX, Count, OpenShare, Seed, Whole
from fedfr_jax.schema import checked

AtLeastTwo = Annotated[int, Interval(ge=2, le=MAX)]


@checked
def by_identity(
    labels: np.ndarray,
    *,
    num_clients: Count,
    ids_per_client: Count | Sequence[Count],
    num_public_ids: Whole,
    num_unseen_ids: Whole = 0,
    num_trained_public_ids: Whole = 0,
    min_images: AtLeastTwo = 4,
    public_min_images: Whole = 0,
    max_images: Literal[0] | AtLeastTwo = 0,
    train_fraction: OpenShare = 0.6,
    client_ids_from: np.ndarray | None = None,
    public_ids_from: np.ndarray | None = None,
    unseen_ids_from: np.ndarray | None = None,
    use_validation_split: bool = False,
    names: IdentityNames | None = None,
    seed: Seed = 0,
) -> IdentityPartition:
    """Assign disjoint identities to clients, the public set and the unseen set.

    An identity's train and test images depend on the seed only, not on how many
    clients there are.

    Args:
      labels: [T] int identity of each row, >= 0; gaps are allowed.
      num_clients: N, >= 1.
      ids_per_client: identities of each client, one number or N of them, each >= 1.
      num_public_ids: K_g, identities of the public set; 0 makes it empty.
      num_unseen_ids: K_u, identities of the set that no training sees.
      num_trained_public_ids: number of public identities that are trained on, the first
        ones; the others are left out. Scaling laws vary it with the same unseen
        identities. 0 trains on all.
      min_images: a client's identity has at least this many images, >= 2.
      public_min_images: the same for the global and unseen sets; 0 takes min_images.
      max_images: images kept per identity, drawn with the seed; 0 keeps all.
      train_fraction: share of an identity's images that is trained on, in (0, 1);
        both sides get at least one image. With names it is each image's probability.
      client_ids_from: [M] bool identities that clients may hold; None for all.
      public_ids_from: [M] bool, the same for the global set.
      unseen_ids_from: [M] bool, the same for the unseen set.
      use_validation_split: True leaves out test images and unseen identities, to choose
        settings without them: clients are tested on a part of their training images,
        split in the same way, and the last public identities are the unseen ones.
      names: of images and identities, if the source has them; None samples by row
        numbers.
      seed: any int >= 0.
    """
    labels = check_labels(labels)
    sizes = client_sizes(num_clients, ids_per_client, len(labels))
    public_min = public_min_images or min_images
    num_validation = num_unseen_ids if use_validation_split else 0
    _check_public(num_public_ids, num_trained_public_ids, num_validation)
    keys, order = _keys_and_order(labels, names, max_images, seed)
    grouped = group(labels, keys, max_images)
    counts = grouped.counts
    client_ids, public, unseen = draw_identities(
        order,
        IdentityRequest(
            "num_clients, ids_per_client or min_images",
            int(sizes.sum()),
            _pool(counts >= min_images, client_ids_from, "client_ids_from"),
        ),
        IdentityRequest(
            "num_public_ids or public_min_images",
            num_public_ids,
            _pool(counts >= public_min, public_ids_from, "public_ids_from"),
        ),
        IdentityRequest(
            "num_unseen_ids or public_min_images",
            num_unseen_ids,
            _pool(counts >= public_min, unseen_ids_from, "unseen_ids_from"),
        ),
    )

    def train_part(used, share):
        if names is None:
            return _train_part(used, train_fraction)
        number = np.bincount(labels[keys < share], minlength=len(counts))[client_ids]
        return np.clip(number, 1, used - 1)

    used = grouped.used(client_ids)
    num_train = train_part(used, train_fraction)
    if use_validation_split:
        if num_train.min() < 2:
            raise ValueError(
                "min_images must leave each identity two training images if "
                f"use_validation_split is set, got {min_images}."
            )
        used, num_train = num_train, train_part(num_train, train_fraction**2)
        public, unseen = np.split(public, [len(public) - num_unseen_ids])
    public = public[: num_trained_public_ids or len(public)]
    split = IdentitySplit(np.zeros_like(used), num_train, num_train, used - num_train)
    fewest = min(min_images, public_min)
    return assemble(grouped, sizes, client_ids, public, unseen, split, fewest)


def _keys_and_order(labels, names, max_images, seed):
    """(sort key [T] of rows within an identity, random order of the identities [M])."""
    num_identities = int(labels.max()) + 1
    if names is None:
        rng = np.random.default_rng(seed)
        # One number per row, drawn before anything else: see the docstring.
        return rng.random(len(labels)), rng.permutation(num_identities)
    order = np.argsort(name_keys(names.identities[:num_identities], seed, "identity"))
    keys = name_keys(names.images, seed, "train")
    if max_images:  # those that are kept come first
        ranked = group(labels, name_keys(names.images, seed, "kept"))
        rank = np.arange(len(labels)) - np.repeat(ranked.starts[:-1], ranked.counts)
        keys[ranked.order] += rank >= max_images
    return keys, order


def _train_part(used: np.ndarray, fraction: float) -> np.ndarray:
    """Number of training images of each identity, with one left for test at least."""
    return np.clip(np.rint(fraction * used).astype(np.int64), 1, used - 1)


@checked
def ms1m(
    labels: np.ndarray,
    *,
    num_clients: Count = 40,
    ids_per_client: Count = 100,
    num_public_ids: Whole = 6000,
    num_unseen_ids: Whole = 0,
    num_test_images: Count = 40,
    client_images: tuple[int, int] = (100, 110),
    public_images: tuple[int, int] = (60, 80),
    seed: int = 100,
) -> IdentityPartition:
    """Split MS1M-ArcFace (85,742 identities) as in FedFR's experiments.

    The identities are shuffled. The first half gives the clients: those whose number
    of images is strictly inside `client_images`, the first N * ids_per_client of
    them; their first `num_test_images` images in file order are tested, the rest
    trained. The last half gives the global set: those strictly inside
    `public_images`, with all their images. The paper's generic set is IJB-C; here
    `num_unseen_ids` more identities of the global kind may stand in for it.

    Args:
      labels: [T] int identity of each row in file order, >= 0.
      num_clients: N, >= 1.
      ids_per_client: identities of each client, >= 1.
      num_public_ids: K_g.
      num_unseen_ids: K_u, taken after the global ones.
      num_test_images: test images per client identity, in [1, client_images[0]].
      client_images: open interval of the images of a client's identity.
      public_images: open interval of the images of a global identity.
      seed: of Python's own generator; 100 in the paper.
    """
    labels = check_labels(labels)
    sizes = client_sizes(num_clients, ids_per_client, len(labels))
    if num_test_images > client_images[0]:
        raise ValueError(
            f"num_test_images must be at most {client_images[0]} (client_images), got "
            f"{num_test_images}."
        )
    # Equal keys: a stable sort keeps the file order.
    grouped = group(labels, np.zeros(len(labels)))
    counts = grouped.counts
    shuffled = ms1m_order(labels, seed=seed)
    half = len(shuffled) // 2
    client_ids, public = draw_identities(
        shuffled,
        IdentityRequest(
            "num_clients or ids_per_client (or widen client_images)",
            int(sizes.sum()),
            _ids_within(counts, client_images)
            & _choose_among(shuffled[:half], len(counts)),
        ),
        IdentityRequest(
            "num_public_ids or num_unseen_ids (or widen public_images)",
            num_public_ids + num_unseen_ids,
            _ids_within(counts, public_images)
            & _choose_among(shuffled[half:], len(counts)),
        ),
    )
    used = grouped.used(client_ids)
    num_test = np.full_like(used, num_test_images)
    split = IdentitySplit(num_test, used - num_test, np.zeros_like(used), num_test)
    public, unseen = np.split(public, [num_public_ids])
    return assemble(grouped, sizes, client_ids, public, unseen, split, 0)


def ms1m_order(labels: np.ndarray, *, seed: int = 100) -> np.ndarray:
    """Identities [M'] int32 by first appearance, then shuffled with Python's `random`.

    >>> ms1m_order(np.arange(85742))[:8].tolist()
    [74649, 1046, 49222, 35204, 14994, 60259, 22627, 30820]
    """
    identities, first = np.unique(labels, return_index=True)
    order = identities[np.argsort(first)].tolist()
    random.Random(seed).shuffle(order)
    return np.array(order, np.int32)


def _check_public(num_public_ids, num_trained_public_ids, num_validation):
    num_trained = num_public_ids - num_validation
    if num_trained < 0:
        raise ValueError(
            "num_unseen_ids must be at most num_public_ids if use_validation_split is "
            f"set, got {num_validation} and {num_public_ids}."
        )
    if num_trained_public_ids > num_trained:
        raise ValueError(
            f"num_trained_public_ids must be at most {num_trained}, the number of "
            f"public identities in training, got {num_trained_public_ids}."
        )


def _pool(has_enough: np.ndarray, allowed: np.ndarray | None, key: str) -> np.ndarray:
    """Mask [M] of identities with enough images that are allowed by the mask `key`."""
    if allowed is None:
        return has_enough
    allowed = np.asarray(allowed)
    if allowed.dtype != bool or allowed.ndim != 1 or len(allowed) < len(has_enough):
        raise ValueError(
            f"{key} must be a mask over all {len(has_enough)} identities, got "
            f"shape {allowed.shape} of {allowed.dtype}."
        )
    # Identities at the end of the source may have no image at all.
    return has_enough & allowed[: len(has_enough)]


def _ids_within(counts: np.ndarray, interval: tuple[int, int]) -> np.ndarray:
    return (counts > interval[0]) & (counts < interval[1])


def _choose_among(identities: np.ndarray, num_identities: int) -> np.ndarray:
    mask = np.zeros(num_identities, bool)
    mask[identities] = True
    return mask
