"""Partition by client for classification: contract, held-out test rows, assignment.

Two cases. A set with its own test part (`is_test`): clients train on the other rows
only, and are tested on official test images of the classes that they train on. A set
without: a `test_fraction` of each client's rows is held out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.partition.rows import (
    UNASSIGNED,
    ClientRows,
    group_rows,
    name_keys,
)


class ClientPartition(NamedTuple):
    """Rows of a source by client, for closed-set classification.

    A client's rows are in the order of the source. No row is in both parts or with two
    clients. Labels are those of the source.
    """

    train: ClientRows
    test: ClientRows
    num_classes: int  # M
    client_names: tuple[str, ...] = ()  # N, where the source has names for them

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.train.sizes)


def hold_out_by_name(
    split: ClientPartition,
    labels: np.ndarray,
    names: Sequence[str],
    test_fraction: float,
    seed: int,
) -> ClientPartition:
    """Choose test rows by image name and seed; clients keep their examples.

    So an additional image never makes a training image a test image. A client of
    several rows keeps a row of both kinds, and a class a training row: if chance would
    leave none, one row changes sides.

    Args:
      labels: [T] class of each row.
      names: [T] of the images.
      test_fraction: probability of each image to be for the test, in (0, 1).
    """
    owner = np.full(len(labels), UNASSIGNED)
    for part in (split.train, split.test):
        owner[part.rows] = part.client
    keys = name_keys(names, seed, "test")
    is_test = keys < test_fraction
    classes = np.where(owner == UNASSIGNED, UNASSIGNED, labels)
    is_test[_last_of_client(owner, -keys, ~is_test, min_rows=2)] = True
    is_test[_last_of_client(owner, keys, is_test)] = False
    is_test[_last_of_client(classes, keys, is_test)] = False
    train, test = (
        group_rows(owner, labels, split.num_clients, is_part)
        for is_part in (~is_test, is_test)
    )
    return split._replace(train=train, test=test)


def _last_of_client(groups, keys, is_in, min_rows=1):
    """Row of largest key of each group of at least `min_rows` rows, all in `is_in`."""
    order = np.lexsort((keys, groups))
    order = order[groups[order] != UNASSIGNED]
    starts = np.flatnonzero(np.diff(groups[order], prepend=UNASSIGNED))
    ends = np.append(starts[1:], len(order))
    is_whole = np.logical_and.reduceat(is_in[order], starts)
    return order[ends - 1][is_whole & (ends - starts >= min_rows)]


def drop_clients(
    split: ClientPartition, count: int, *, seed: int = 0
) -> tuple[ClientPartition, ClientPartition]:
    """Split off `count` random clients: (the partition without them, they alone).

    Clients of both are numbered from 0 in the order that they had.
    """
    if not 0 <= count < split.num_clients:
        raise ValueError(
            f"unseen_clients must be an integer in [0, {split.num_clients}), the "
            f"number of clients, got {count!r}."
        )

    def keep(clients):
        names = split.client_names and tuple(split.client_names[c] for c in clients)
        train, test = split.train.keep(clients), split.test.keep(clients)
        return ClientPartition(train, test, split.num_classes, names)

    order = np.random.default_rng(seed).permutation(split.num_clients)
    return keep(np.sort(order[count:])), keep(np.sort(order[:count]))


class Assignment(NamedTuple):
    """Rows of a source on their way to N clients."""

    labels: np.ndarray  # [T] int32 in [0, M)
    num_classes: int  # M
    num_clients: int  # N
    rows: np.ndarray  # [A] training rows, or all rows without a test part
    official_test: np.ndarray  # [E] rows of the set's own test part, perhaps none
    test_fraction: float  # held out of each client's rows without a test part
    owner: np.ndarray  # [T] client of each row, UNASSIGNED at first; to be written
    rng: np.random.Generator

    def by_class(self, rows: np.ndarray) -> list[np.ndarray]:
        """Shuffled rows of each class, M x [n]."""
        rows = self.rng.permutation(rows)
        rows = rows[np.argsort(self.labels[rows], kind="stable")]
        counts = np.bincount(self.labels[rows], minlength=self.num_classes)
        return np.split(rows, np.cumsum(counts)[:-1])

    def check_enough(self, keys: str, per_client: int) -> None:
        """Raise ValueError unless there are `per_client` rows for every client."""
        if self.num_clients * per_client > len(self.rows):
            raise ValueError(
                f"{keys} must be at most {len(self.rows)}, the number of training "
                f"rows, got {self.num_clients * per_client}."
            )

    def check_classes(self, classes_per_client: int) -> None:
        """Raise ValueError unless there are as many classes as a client has."""
        if classes_per_client > self.num_classes:
            raise ValueError(
                f"classes_per_client must be at most {self.num_classes}, the number of "
                f"classes, got {classes_per_client}."
            )

    def top_up(self, min_rows: int) -> None:
        """Move rows from the largest clients to those with fewer than `min_rows`."""
        owner, rows = self.owner, self.rows
        counts = np.bincount(owner[rows], minlength=self.num_clients)
        missing = np.maximum(min_rows - counts, 0)
        receivers = np.repeat(np.arange(self.num_clients), missing)
        rows = self.rng.permutation(rows)
        rows = rows[np.argsort(owner[rows], kind="stable")]
        rank = np.arange(len(rows)) - (np.cumsum(counts) - counts)[owner[rows]]
        # A client of n rows has ranks 0 to n - 1: the highest belong to the largest.
        spare = rows[np.argsort(-rank, kind="stable")[: len(receivers)]]
        owner[spare] = receivers

    def follow_training(self) -> None:
        """Assign the official test rows in the proportions of the training rows.

        A client that trains on a share q of the n training rows of a class gets q times
        its test rows, rounded up or down at random.
        """
        train, test = self.by_class(self.rows), self.by_class(self.official_test)
        for train_rows, test_rows in zip(train, test, strict=True):
            owners = np.sort(self.owner[train_rows])
            phase = self.rng.integers(len(owners))
            # Evenly spaced places in the list of owners, sorted: systematic sampling.
            positions = np.arange(len(test_rows)) * len(owners) + phase
            self.owner[test_rows] = owners[positions // max(len(test_rows), 1)]

    def partition(self) -> ClientPartition:
        """Build the partition from each row's owner, with held-out rows if needed.

        If rows are held out, a client with one row only trains; every other client has
        training and test rows.
        """
        is_test = np.zeros(len(self.owner), bool)
        is_test[self.official_test] = True
        if not len(self.official_test):
            is_test[self._held_out()] = True
        train, test = (
            group_rows(self.owner, self.labels, self.num_clients, is_part)
            for is_part in (~is_test, is_test)
        )
        is_empty = train.sizes == 0
        if is_empty.any():
            raise ValueError(
                "every client must have a training row, got none for client "
                f"{int(np.argmax(is_empty))} ({is_empty.sum()} such of "
                f"{self.num_clients})."
            )
        return ClientPartition(train, test, self.num_classes)

    def _held_out(self):
        """Choose test rows: `test_fraction` of each client's, evenly over classes."""
        shuffled = self.rng.permutation(np.flatnonzero(self.owner != UNASSIGNED))
        order = np.lexsort((self.labels[shuffled], self.owner[shuffled]))
        shuffled = shuffled[order]
        client = self.owner[shuffled]
        sizes = np.bincount(client, minlength=self.num_clients)
        num_test = np.rint(self.test_fraction * sizes).astype(np.int64)
        num_test = np.minimum(np.maximum(num_test, 1), sizes - 1)
        phase = self.rng.integers(np.maximum(sizes, 1))
        number = np.arange(len(shuffled)) - (np.cumsum(sizes) - sizes)[client]
        # Every (n / num_test)-th of n rows, from a random start, in whole numbers.
        taken_before = (number * num_test[client] + phase[client]) // sizes[client]
        taken_after = ((number + 1) * num_test[client] + phase[client]) // sizes[client]
        return shuffled[taken_after > taken_before]


def begin_assignment(
    labels: np.ndarray,
    num_clients: int,
    is_test: np.ndarray | None,
    test_fraction: float,
    seed: int,
) -> Assignment:
    """Check a source's labels and collect the rows to assign; nothing is assigned yet.

    Args:
      labels: [T] int class of each row; every class in [0, M) has a training row.
      is_test: [T] bool, the set's own test part, or None.
    """
    labels = np.asarray(labels, np.int32)
    is_official = np.zeros(len(labels), bool)
    if is_test is not None:
        is_official = np.asarray(is_test)
        if not is_official.any():
            raise ValueError(
                "is_test must be True for at least one row, or None, got no True."
            )
    num_classes = int(labels.max()) + 1
    counts = np.bincount(labels[~is_official], minlength=num_classes)
    if not counts.all():
        raise ValueError(
            f"labels must have a training row of every class in [0, {num_classes}), "
            f"got none of class {int(np.argmin(counts))} ({np.sum(counts == 0)} such)."
        )
    return Assignment(
        labels=labels,
        num_classes=num_classes,
        num_clients=num_clients,
        rows=np.flatnonzero(~is_official),
        official_test=np.flatnonzero(is_official),
        test_fraction=test_fraction,
        owner=np.full(len(labels), UNASSIGNED),
        rng=np.random.default_rng(seed),
    )


def assign_classes(
    num_clients: int, num_classes: int, per_client: int, rng: np.random.Generator
) -> np.ndarray:
    """Sample k classes for each client, so that all classes have equally many clients.

    In a block of M clients the i-th has the classes i, i + 1, ..., i + k - 1 modulo M,
    renamed by a permutation per block, so that every class has k owners. In the last
    block of r < M clients the first class is i * M // r instead, which spreads the
    owners evenly over the classes.

    Args:
      num_clients: N.
      num_classes: M.
      per_client: k <= M.

    Returns:
      [N, k] int, no class twice with a client; the numbers of owners of two classes
      differ by one at most.
    """
    first_class = np.arange(num_clients) % num_classes
    num_last = num_clients % num_classes
    if num_last:
        first_class[-num_last:] = np.arange(num_last) * num_classes // num_last
    num_blocks = -(-num_clients // num_classes)
    names = np.tile(np.arange(num_classes), (num_blocks, 1))
    names = rng.permuted(names, axis=1)
    block = np.arange(num_clients) // num_classes
    column = (first_class[:, None] + np.arange(per_client)) % num_classes
    return rng.permutation(names[block[:, None], column])


def divide_proportionally(
    assignment: Assignment, rows: np.ndarray, owned: np.ndarray
) -> None:
    """Divide every class's rows equally among its clients, of about equal size.

    The rows that remain of an equal division go to the clients that are furthest below
    their share of the previous classes.

    Args:
      rows: [n] to assign.
      owned: [N, k] int classes of each client.
    """
    rows_by_class = assignment.by_class(rows)
    counts = np.bincount(owned.reshape(-1), minlength=len(rows_by_class))
    by_class = np.argsort(owned, axis=None, kind="stable") // owned.shape[1]
    owners = np.split(by_class, np.cumsum(counts)[:-1])
    surplus = np.zeros(len(owned))  # rows above an exactly equal share
    for class_rows, clients in zip(rows_by_class, owners, strict=True):
        chance = assignment.rng.random(len(clients))
        clients = clients[np.lexsort((chance, surplus[clients]))]
        receivers = clients[np.arange(len(class_rows)) % len(clients)]
        assignment.owner[class_rows] = receivers
        num_left_over = len(class_rows) % len(clients)
        surplus[clients[:num_left_over]] += 1
        surplus[clients] -= num_left_over / len(clients)
