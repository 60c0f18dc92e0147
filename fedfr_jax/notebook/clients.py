"""Examples by client, as a notebook has them."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.partition import ClientSplit
from fedfr_jax.federated.client import EqualRows, Population
from fedfr_jax.stream import Stream, stream
from fedfr_jax.types import Dataset

AT_ONCE = 2**24  # bytes of examples that are looked at together


class FederatedDataset(NamedTuple):
    """Examples grouped by client, in host memory or read when they are needed."""

    table: Dataset | Stream  # [T, ...] and labels [T]
    population: Population
    clients: np.ndarray | range  # [N] what the clients are called

    @classmethod
    def from_client_ids(cls, x, y, owner) -> "FederatedDataset":
        """Examples and whose they are.

        Args:
          x: [T, ...] what networks see: finite floats, or uint8 that a feed decodes.
          y: [T] whole numbers from 0, the classes.
          owner: [T] client of each example, numbers or names.

        Raises:
          ValueError: when the three differ in length, or a number of x or y is none
            that a network can be trained on.
        """
        x, y, owner = examples(x), class_labels("y", y), np.asarray(owner)
        if owner.ndim != 1 or (owner.dtype.kind == "f" and np.isnan(owner).any()):
            raise ValueError(
                "owner must be one number or name per example, shape [T], without nan, "
                f"got {owner.dtype} of shape {owner.shape}."
            )
        if not len(x) == len(y) == len(owner) > 0:
            raise ValueError(
                "x, y and owner must have one entry per example, got "
                f"{len(x)}, {len(y)} and {len(owner)}."
            )
        clients, place = np.unique(owner, return_inverse=True)
        order = np.argsort(place, kind="stable")
        offsets = np.concatenate([[0], np.cumsum(np.bincount(place))])
        num_classes = np.broadcast_to(np.int32(y.max() + 1), len(clients))
        table = Dataset.labelled(x[order], y[order])
        return cls(table, Population(offsets, num_classes), clients)

    @classmethod
    def from_split(
        cls, x, y, split: ClientSplit
    ) -> tuple["FederatedDataset", "FederatedDataset"]:
        """The training and the test part of a partition such as `dirichlet(y, ...)`.

        Raises:
          ValueError: as `from_client_ids`, or for labels that are not of the split's
            classes.
        """
        parts = (split.train, split.train_offsets), (split.test, split.test_offsets)
        num_clients = len(split.train_offsets) - 1
        num_classes = np.broadcast_to(np.int32(split.num_classes), num_clients)
        x, y = examples(x), class_labels("y", y, split.num_classes)
        made = [
            cls(
                Dataset.labelled(x[rows], y[rows]),
                Population(offsets.astype(np.int64), num_classes),
                np.arange(num_clients),
            )
            for rows, offsets in parts
        ]
        return made[0], made[1]

    @classmethod
    def from_reader(
        cls, read: Callable, labels, *, num_clients: int, num_classes: int
    ) -> "FederatedDataset":
        """Examples that are read when a round needs them, as many of every client.

        Client i owns the i-th of `num_clients` equal parts of the examples. No array
        has an entry per client, so that memory is that of a cohort.

        Args:
          read: rows [n] int64 -> [n, ...] what networks see, from another thread.
          labels: [T] int. Those that do not fit memory may be int32 of a memory map, or
            one for all: `np.broadcast_to(np.int32(0), T)`.

        Raises:
          ValueError: unless all clients have as many examples, and labels are whole
            numbers in [0, num_classes).
        """
        labels = class_labels("labels", labels, num_classes)
        each, left = divmod(len(labels), max(num_clients, 1))
        if num_clients < 1 or each < 1 or left:
            raise ValueError(
                "labels must be as many for each of num_clients, got "
                f"{len(labels)} for {num_clients}."
            )
        classes = np.broadcast_to(np.int32(num_classes), num_clients)
        population = Population(EqualRows(num_clients, each), classes)
        return cls(stream(read, labels), population, range(num_clients))

    def __repr__(self) -> str:
        return (
            f"FederatedDataset({len(self.clients)} clients, {self.table.num_examples} "
            f"examples of {self.table.image_shape})"
        )


def examples(x) -> np.ndarray:
    """`x` [T, ...] as an array of numbers.

    Raises:
      ValueError: for anything else, and for nan or infinity, with the first example.
    """
    x = np.asarray(x)
    if x.ndim < 1 or x.dtype.kind not in "fiub":
        raise ValueError(f"x must be numbers of shape [T, ...], got {kind_of(x)}.")
    if x.dtype.kind != "f":
        return x
    step = max(AT_ONCE // max(x[:1].nbytes, 1), 1)
    for start in range(0, len(x), step):
        part = x[start : start + step]
        is_fine = np.isfinite(part).reshape(len(part), -1).all(axis=1)
        if not is_fine.all():
            raise ValueError(
                "x must be finite, got nan or infinity in example "
                f"{start + int(is_fine.argmin())}. Remove or repair it."
            )
    return x


def class_labels(name: str, y, num_classes: int | None = None) -> np.ndarray:
    """Labels [T] as int32, each in [0, num_classes).

    Raises:
      ValueError: for anything else: one-hot rows, text, fractions, other classes.
    """
    y = np.asarray(y)
    if y.ndim != 1:
        raise ValueError(
            f"{name} must be one label per example, shape [T], got shape {y.shape}. "
            f"Give {name}.argmax(1) for one-hot rows, {name}[:, 0] for a column."
        )
    if y.dtype.kind not in "fiub":
        raise ValueError(
            f"{name} must be whole numbers, got {kind_of(y)}. Give "
            f"np.unique({name}, return_inverse=True)[1] for names of classes."
        )
    if y.dtype.kind == "f":
        is_whole = np.isfinite(y) & (y == np.floor(y))
        if not is_whole.all():
            got = y[is_whole.argmin()]
            raise ValueError(f"{name} must be whole numbers, got {got}.")
    least, most = (y.min(), y.max()) if len(y) else (0, 0)
    limit = 2**31 - 1 if num_classes is None else num_classes
    if least < 0 or most >= limit:
        got = least if least < 0 else most
        raise ValueError(f"{name} must lie in [0, {limit}), got {got}.")
    return y if y.dtype == np.int32 else y.astype(np.int32)


def kind_of(x: np.ndarray) -> str:
    """An array's first entry, or its kind, for an error."""
    first = x.reshape(-1)[:1].tolist()
    return f"{first[0]!r}" if first else f"an array of {x.dtype}"
