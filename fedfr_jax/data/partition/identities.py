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
from typing import Annotated, Literal, NamedTuple

import numpy as np
from annotated_types import Interval

from fedfr_jax.data.partition.rows import ClientRows, cumulative, name_keys
from fedfr_jax.ranges import MAX, Count, OpenShare, Seed, Whole
from fedfr_jax.schema import checked

AtLeastTwo = Annotated[int, Interval(ge=2, le=MAX)]


class IdentityRows(NamedTuple):
    """Rows of a source of K identities."""

    rows: np.ndarray  # [n] int32
    labels: np.ndarray  # [n] int32 in [0, K)
    identities: np.ndarray  # [K] int32


class IdentityPartition(NamedTuple):
    """Rows of a source for every part of a federated run.

    Clients' rows are grouped by client, then by class; their labels are the client's
    own classes. "Identity" is always the source's own label.
    """

    train: ClientRows
    test: ClientRows
    num_classes: np.ndarray  # [N] int32
    client_identities: np.ndarray  # [I] int32, client by client, in class order
    public: IdentityRows
    unseen: IdentityRows  # that no training sees
    left_out: dict[str, int]  # identities and images that no part uses, by reason

    @property
    def identities(self) -> list[np.ndarray]:
        """Identities of each client in class order, N x [num_classes[c]] int32."""
        return np.split(self.client_identities, np.cumsum(self.num_classes)[:-1])

    def identities_of(self, part: ClientRows) -> np.ndarray:
        """Identity of each row of a part, `train` or `test`, [n] int32."""
        first = np.cumsum(self.num_classes) - self.num_classes
        return self.client_identities[first[part.client] + part.labels]

    @property
    def train_identities(self) -> np.ndarray:
        """Identity of each training row."""
        return self.identities_of(self.train)

    @property
    def test_identities(self) -> np.ndarray:
        """Identity of each test row."""
        return self.identities_of(self.test)


class IdentityNames(NamedTuple):
    """Names of a source's images [T] and identities [M]."""

    images: Sequence[str]
    identities: Sequence[str]


class IdentityRequest(NamedTuple):
    """How many identities one part of a split needs, and from which pool."""

    keys: str  # to lower when it cannot be met
    number: int
    pool: np.ndarray  # [M] bool


def draw_identities(order: np.ndarray, *needs: IdentityRequest) -> list[np.ndarray]:
    """Assign each request its first identities in `order`, none twice."""
    free = np.ones(len(needs[0].pool), bool)
    assigned = {}
    # The smallest pool first: otherwise other parts may take the identities it needs.
    for i in sorted(range(len(needs)), key=lambda i: (int(needs[i].pool.sum()), i)):
        keys, number, pool = needs[i]
        usable = order[(pool & free)[order]]
        if number > len(usable):
            raise ValueError(
                f"{keys} needs {number} identities, got {len(usable)} unassigned ones "
                f"of {int(pool.sum())} with enough images, among {len(order)} in all. "
                f"Lower {keys}."
            )
        assigned[i] = usable[:number].astype(np.int32)
        free[assigned[i]] = False
    return [assigned[i] for i in range(len(needs))]


class RankedRows(NamedTuple):
    """Rows of a source, each with its rank among those of its identity."""

    labels: np.ndarray  # [T] int32 identity
    rank: np.ndarray  # [T] int, from 0
    counts: np.ndarray  # [M] number of rows of each identity, used or not
    max_rows: int = 0  # rows of an identity that are used, its first ones; 0: all

    def used(self, identities: np.ndarray) -> np.ndarray:
        """Number of used rows of `identities` [I]."""
        counts = self.counts[identities]
        return np.minimum(counts, self.max_rows) if self.max_rows else counts

    def select(
        self, identities: np.ndarray, first: np.ndarray, end: np.ndarray
    ) -> IdentityRows:
        """Rows of the ranks [first, end) of each identity, all [I], in file order."""
        number = np.full(len(self.counts), -1, np.int32)
        number[identities] = np.arange(len(identities))
        rows = np.flatnonzero(number[self.labels] >= 0)
        index, rank = number[self.labels[rows]], self.rank[rows]
        is_in = (first[index] <= rank) & (rank < end[index])
        rows, index = rows[is_in], index[is_in]
        order = np.argsort(index, kind="stable")
        return IdentityRows(rows[order].astype(np.int32), index[order], identities)


def rank_rows(labels: np.ndarray, keys: np.ndarray, max_rows: int = 0) -> RankedRows:
    """Rank the rows [T] of each label by their keys."""
    counts, order = np.bincount(labels), np.lexsort((keys, labels))
    rank = np.empty(len(labels), np.int64)
    rank[order] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    return RankedRows(labels, rank, counts, max_rows)


def assemble(
    ranked: RankedRows,
    sizes: np.ndarray,
    client_ids: np.ndarray,
    public_ids: np.ndarray,
    unseen_ids: np.ndarray,
    *,
    cut: np.ndarray,
    end: np.ndarray,
    is_test_first: bool = False,
    fewest: int = 0,
) -> IdentityPartition:
    """Build the partition from the sampled identities.

    Args:
      sizes: [N] identities of each client.
      client_ids: [I] identities of the clients, client by client.
      cut, end: [I] ranks of these identities' rows: those below `cut` are for training,
        the others below `end` for the test; or the reverse with `is_test_first`.
      fewest: images that an identity must have to be used at all.
    """
    client = np.repeat(np.arange(len(sizes)), sizes)

    def client_rows(first, end):
        part = ranked.select(client_ids, first, end)
        owner = client[part.labels]
        offsets = cumulative(np.bincount(owner, minlength=len(sizes)))
        labels = part.labels - cumulative(sizes)[owner]
        return ClientRows(part.rows, offsets, labels.astype(np.int32))

    train, test = client_rows(np.zeros_like(cut), cut), client_rows(cut, end)
    if is_test_first:
        train, test = test, train
    public, unseen = (
        ranked.select(ids, np.zeros_like(ids), ranked.used(ids))
        for ids in (public_ids, unseen_ids)
    )
    counts = ranked.counts
    num_rows = sum(len(part.rows) for part in (train, test, public, unseen))
    num_ids = len(client_ids) + len(public_ids) + len(unseen_ids)
    num_poor = int(np.sum((counts > 0) & (counts < fewest)))
    left_out = {
        "identities with too few images": num_poor,
        "identities not needed": int(np.sum(counts > 0)) - num_poor - num_ids,
        "images": int(counts.sum()) - num_rows,
    }
    return IdentityPartition(
        train=train,
        test=test,
        num_classes=sizes.astype(np.int32),
        client_identities=client_ids,
        public=public,
        unseen=unseen,
        left_out=left_out,
    )


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
      public_min_images: the same for the public and unseen sets; 0 takes min_images.
      max_images: images kept per identity, drawn with the seed; 0 keeps all.
      train_fraction: share of an identity's images that is trained on, in (0, 1);
        both sides get at least one image. With names it is each image's probability.
      client_ids_from: [M] bool identities that clients may hold; None for all.
      public_ids_from: [M] bool, the same for the public set.
      unseen_ids_from: [M] bool, the same for the unseen set.
      use_validation_split: True leaves out test images and unseen identities, to choose
        settings without them: clients are tested on a part of their training images,
        split in the same way, and the last public identities are the unseen ones.
      names: of images and identities, if the source has them; None samples by row
        numbers.
      seed: any int >= 0.
    """
    labels = np.asarray(labels, np.int32)
    sizes = np.asarray(ids_per_client)
    if sizes.shape not in ((), (num_clients,)):
        raise ValueError(
            f"ids_per_client must be one integer or {num_clients} (num_clients), got "
            f"{ids_per_client}."
        )
    sizes = np.broadcast_to(sizes, (num_clients,))
    public_min = public_min_images or min_images
    num_trained = num_public_ids - (num_unseen_ids if use_validation_split else 0)
    if num_trained < num_trained_public_ids:
        raise ValueError(
            "num_trained_public_ids must be at most num_public_ids (without "
            "num_unseen_ids of them if use_validation_split is set), got "
            f"{num_trained_public_ids} of {num_trained}."
        )
    keys, order = _keys_and_order(labels, names, max_images, seed)
    ranked = rank_rows(labels, keys, max_images)
    counts = ranked.counts
    client_ids, public, unseen = draw_identities(
        order,
        IdentityRequest(
            "num_clients, ids_per_client or min_images",
            int(sizes.sum()),
            _pool(counts >= min_images, client_ids_from),
        ),
        IdentityRequest(
            "num_public_ids or public_min_images",
            num_public_ids,
            _pool(counts >= public_min, public_ids_from),
        ),
        IdentityRequest(
            "num_unseen_ids or public_min_images",
            num_unseen_ids,
            _pool(counts >= public_min, unseen_ids_from),
        ),
    )

    def train_part(used, share):
        number = np.rint(train_fraction * used)
        if names is not None:
            number = np.bincount(labels, keys < share, len(counts))[client_ids]
        return np.clip(number.astype(np.int64), 1, used - 1)  # one is for the test

    used = ranked.used(client_ids)
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
    fewest, identities = min(min_images, public_min), (client_ids, public, unseen)
    return assemble(ranked, sizes, *identities, cut=num_train, end=used, fewest=fewest)


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
        kept_first = rank_rows(labels, name_keys(names.images, seed, "kept"))
        keys += kept_first.rank >= max_images
    return keys, order


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
    trained. The last half gives the public set: those strictly inside
    `public_images`, with all their images. The paper's generic set is IJB-C; here
    `num_unseen_ids` more identities of the public kind may stand in for it.

    Args:
      labels: [T] int identity of each row in file order, >= 0.
      num_clients: N, >= 1.
      ids_per_client: identities of each client, >= 1.
      num_public_ids: K_g.
      num_unseen_ids: K_u, taken after the public ones.
      num_test_images: test images per client identity, in [1, client_images[0]].
      client_images: open interval of the images of a client's identity.
      public_images: open interval of the images of a public identity.
      seed: of Python's own generator; 100 in the paper.
    """
    labels = np.asarray(labels, np.int32)
    sizes = np.broadcast_to(ids_per_client, (num_clients,))
    if num_test_images > client_images[0]:
        raise ValueError(
            f"num_test_images must be at most {client_images[0]} (client_images), got "
            f"{num_test_images}."
        )
    # Equal keys: a stable sort keeps the file order.
    ranked = rank_rows(labels, np.zeros(len(labels)))
    counts = ranked.counts
    shuffled = ms1m_order(labels, seed=seed)
    half = len(shuffled) // 2
    client_ids, public = draw_identities(
        shuffled,
        IdentityRequest(
            "num_clients or ids_per_client (or widen client_images)",
            int(sizes.sum()),
            (counts > client_images[0])
            & (counts < client_images[1])
            & np.isin(np.arange(len(counts)), shuffled[:half]),
        ),
        IdentityRequest(
            "num_public_ids or num_unseen_ids (or widen public_images)",
            num_public_ids + num_unseen_ids,
            (counts > public_images[0])
            & (counts < public_images[1])
            & np.isin(np.arange(len(counts)), shuffled[half:]),
        ),
    )
    public, unseen = np.split(public, [num_public_ids])
    return assemble(
        ranked,
        sizes,
        client_ids,
        public,
        unseen,
        cut=np.full(len(client_ids), num_test_images),
        end=ranked.used(client_ids),
        is_test_first=True,
    )


def ms1m_order(labels: np.ndarray, *, seed: int = 100) -> np.ndarray:
    """Identities [M'] int32 by first appearance, then shuffled with Python's `random`.

    >>> ms1m_order(np.arange(85742))[:8].tolist()
    [74649, 1046, 49222, 35204, 14994, 60259, 22627, 30820]
    """
    identities, first = np.unique(labels, return_index=True)
    order = identities[np.argsort(first)].tolist()
    random.Random(seed).shuffle(order)
    return np.array(order, np.int32)


def _pool(has_enough: np.ndarray, allowed: np.ndarray | None) -> np.ndarray:
    """Mask [M] of identities with enough images that are allowed by a mask."""
    if allowed is None:
        return has_enough
    # Identities at the end of the source may have no image at all.
    return has_enough & np.asarray(allowed, bool)[: len(has_enough)]
