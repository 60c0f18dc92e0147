"""Examples by client, as a notebook has them."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.partition import ClientSplit
from fedfr_jax.federated.client import EqualRows, Population
from fedfr_jax.stream import Stream, stream
from fedfr_jax.types import Dataset


class FederatedDataset(NamedTuple):
    """Examples grouped by client, in host memory or read when they are needed."""

    table: Dataset | Stream  # [T, ...] and labels [T]
    population: Population
    clients: np.ndarray | range  # [N] what the clients are called

    @classmethod
    def from_client_ids(cls, x, y, owner) -> "FederatedDataset":
        """Examples and whose they are.

        Args:
          x: [T, ...] what networks see: floats, or uint8 that a feed decodes.
          y: [T] int labels.
          owner: [T] client of each example, numbers or names.

        Raises:
          ValueError: when the three differ in length.
        """
        x, y, owner = np.asarray(x), np.asarray(y), np.asarray(owner)
        if not len(x) == len(y) == len(owner) > 0:
            raise ValueError(
                "x, y and owner must have one entry per example, got "
                f"{len(x)}, {len(y)} and {len(owner)}."
            )
        clients, place = np.unique(owner, return_inverse=True)
        order = np.argsort(place, kind="stable")
        offsets = np.concatenate([[0], np.cumsum(np.bincount(place))])
        num_classes = np.broadcast_to(np.int32(y.max() + 1), len(clients))
        table = Dataset.labelled(x[order], y[order].astype(np.int32))
        return cls(table, Population(offsets, num_classes), clients)

    @classmethod
    def from_split(
        cls, x, y, split: ClientSplit
    ) -> tuple["FederatedDataset", "FederatedDataset"]:
        """The training and the test part of a partition such as `dirichlet(y, ...)`."""
        parts = (split.train, split.train_offsets), (split.test, split.test_offsets)
        num_clients = len(split.train_offsets) - 1
        num_classes = np.broadcast_to(np.int32(split.num_classes), num_clients)
        x, y = np.asarray(x), np.asarray(y)
        made = [
            cls(
                Dataset.labelled(x[rows], y[rows].astype(np.int32)),
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
          ValueError: unless all clients have as many examples.
        """
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
