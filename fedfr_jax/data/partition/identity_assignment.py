"""Partition of identities: the contract of face partitions."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class IdentityPartition(NamedTuple):
    """Rows of a source for every part of a federated run.

    Rows of client c are `train[train_offsets[c]:train_offsets[c + 1]]`, and the same
    for test. A device table of `train ++ public_examples` therefore has client c at
    positions `train_offsets[c]:train_offsets[c + 1]` and public image g at position
    `len(train) + g`. "Identity" is always the source's own label.
    """

    train: np.ndarray  # [C] int32 rows, grouped by client, then by class
    train_offsets: np.ndarray  # [N + 1] int32
    train_labels: np.ndarray  # [C] int32 the client's own class
    num_classes: np.ndarray  # [N] int32
    test: np.ndarray  # [E] int32 rows, grouped like train
    test_offsets: np.ndarray  # [N + 1] int32
    test_labels: np.ndarray  # [E] int32 the client's own class
    test_identities: np.ndarray  # [E] int32
    client_identities: np.ndarray  # [I] int32, client by client, in class order
    public_examples: np.ndarray  # [G] int32 rows
    public_labels: np.ndarray  # [G] int32 in [0, K_g)
    public_identities: np.ndarray  # [K_g] int32
    unseen_examples: np.ndarray  # [U] int32 rows that no training sees
    unseen_labels: np.ndarray  # [U] int32 in [0, K_u)
    unseen_identities: np.ndarray  # [K_u] int32
    left_out: dict[str, int]  # identities and images that no part uses, by reason

    @property
    def identities(self) -> list[np.ndarray]:
        """Identities of each client in class order, N x [num_classes[c]] int32."""
        return np.split(self.client_identities, np.cumsum(self.num_classes)[:-1])

    @property
    def train_identities(self) -> np.ndarray:
        """Identity of each training row, [T_train] int32."""
        first = np.cumsum(self.num_classes) - self.num_classes
        first = np.repeat(first, np.diff(self.train_offsets))
        return self.client_identities[first + self.train_labels]


class IdentityNames(NamedTuple):
    """Names of a source's images [T] and identities [M]."""

    images: Sequence[str]
    identities: Sequence[str]


def name_keys(names: Sequence[str], seed: int, use: str) -> np.ndarray:
    """Hash each name [n] to a number in [0, 1), independent of the other names.

    Args:
      use: different uses of a name have different numbers.
    """
    key = f"{seed} {use}".encode()
    digest = lambda name: hashlib.blake2b(name.encode(), digest_size=8, key=key)
    numbers = [int.from_bytes(digest(name).digest()) >> 11 for name in names]
    return np.array(numbers, np.float64) / 2**53


def check_labels(labels: np.ndarray) -> np.ndarray:
    """Return labels [T] as int32; raise ValueError if they are invalid."""
    labels = np.asarray(labels)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            "labels must be a 1-d integer array, got "
            f"shape {labels.shape} of {labels.dtype}."
        )
    if labels.size == 0:
        raise ValueError("labels must have at least one image, got none.")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= 2**31:
        raise ValueError(f"labels must be in [0, 2**31), got {low} to {high}.")
    return labels.astype(np.int32)


def client_sizes(
    num_clients: int, ids_per_client: int | Sequence[int], num_images: int
) -> np.ndarray:
    """Number of identities of each client, [N]."""
    if num_clients > num_images:
        raise ValueError(
            f"num_clients must be at most {num_images}, the number of images, got "
            f"{num_clients}."
        )
    sizes = np.asarray(ids_per_client)
    if sizes.shape not in ((), (num_clients,)):
        raise ValueError(
            f"ids_per_client must be one integer or {num_clients} (num_clients), got "
            f"{ids_per_client}."
        )
    return np.broadcast_to(sizes, (num_clients,))


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


class IdentitySplit(NamedTuple):
    """Training and test rows of I identities."""

    train: np.ndarray  # [I] place of the first training row among its rows
    num_train: np.ndarray  # [I]
    test: np.ndarray  # [I] place of the first test row
    num_test: np.ndarray  # [I]


class RowsByIdentity(NamedTuple):
    """Rows of a source by identity."""

    order: np.ndarray  # [T] int32 rows, those of an identity side by side
    starts: np.ndarray  # [M + 1] of each identity in `order`
    max_rows: int = 0  # rows of an identity that are used, its first ones; 0: all

    @property
    def counts(self) -> np.ndarray:
        """Number of rows of each identity, [M], used or not."""
        return np.diff(self.starts)

    def used(self, identities: np.ndarray) -> np.ndarray:
        """Number of used rows of `identities` [I]."""
        counts = self.counts[identities]
        return np.minimum(counts, self.max_rows) if self.max_rows else counts

    def rows(self, identities, first, count) -> tuple[np.ndarray, np.ndarray]:
        """Rows first, ..., first + count - 1 of each identity, all [I].

        Returns:
          (rows [.] in the order of `identities`, in file order within one, and the
          place [.] of each row's identity), both int32.
        """
        index = np.repeat(np.arange(len(identities), dtype=np.int32), count)
        within = np.arange(len(index)) - (np.cumsum(count) - count)[index]
        rows = self.order[(self.starts[identities] + first)[index] + within]
        return rows[np.lexsort((rows, index))], index


def group(labels: np.ndarray, keys: np.ndarray, max_rows: int = 0) -> RowsByIdentity:
    """Sort rows [T] by label, then by key."""
    order = np.lexsort((keys, labels)).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(np.bincount(labels))])
    return RowsByIdentity(order, starts, max_rows)


def assemble(
    grouped: RowsByIdentity,
    sizes: np.ndarray,
    client_ids: np.ndarray,
    global_ids: np.ndarray,
    unseen_ids: np.ndarray,
    split: IdentitySplit,
    fewest: int,
) -> IdentityPartition:
    """Build the partition from the sampled identities.

    Args:
      sizes: [N] identities of each client.
      client_ids: [I] identities of the clients, client by client.
      split: training and test rows of these identities.
      fewest: images that an identity must have to be used at all.
    """
    class_offsets = np.concatenate([[0], np.cumsum(sizes)])
    client = np.repeat(np.arange(len(sizes)), sizes)

    def client_rows(first, count):
        rows, index = grouped.rows(client_ids, first, count)
        row_counts = np.bincount(client, weights=count, minlength=len(sizes))
        offsets = np.concatenate([[0], np.cumsum(row_counts)]).astype(np.int32)
        labels = index - class_offsets[client[index]]
        return rows, offsets, labels.astype(np.int32)

    def public_rows(ids):
        return grouped.rows(ids, np.zeros_like(ids), grouped.used(ids))

    train, train_offsets, train_labels = client_rows(split.train, split.num_train)
    test, test_offsets, test_labels = client_rows(split.test, split.num_test)
    public, public_labels = public_rows(global_ids)
    unseen, unseen_labels = public_rows(unseen_ids)
    counts = grouped.counts
    num_rows = len(train) + len(test) + len(public) + len(unseen)
    num_ids = len(client_ids) + len(global_ids) + len(unseen_ids)
    num_poor = int(np.sum((counts > 0) & (counts < fewest)))
    left_out = {
        "identities with too few images": num_poor,
        "identities not needed": int(np.sum(counts > 0)) - num_poor - num_ids,
        "images": int(counts.sum()) - num_rows,
    }
    return IdentityPartition(
        train=train,
        train_offsets=train_offsets,
        train_labels=train_labels,
        num_classes=sizes.astype(np.int32),
        test=test,
        test_offsets=test_offsets,
        test_labels=test_labels,
        test_identities=np.repeat(client_ids, split.num_test),
        client_identities=client_ids,
        public_examples=public,
        public_labels=public_labels,
        public_identities=global_ids,
        unseen_examples=unseen,
        unseen_labels=unseen_labels,
        unseen_identities=unseen_ids,
        left_out=left_out,
    )
