"""Whose images are whose: clients of the federation, and clients it never sees."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.partition import ClientSplit, leave_out
from fedfr_jax.federated.client import Population
from fedfr_jax.schema import naming
from fedfr_jax.stream import Stream, stream
from fedfr_jax.tasks.data import split
from fedfr_jax.types import Dataset, Source


class Clients(NamedTuple):
    """Some clients' images, and where each client's are."""

    train: Dataset | Stream
    population: Population  # of the training images
    test: Dataset | Stream
    test_offsets: np.ndarray  # [N + 1]


def parts_of(settings: Mapping, source: Source) -> tuple[ClientSplit, ClientSplit]:
    """(clients of the federation, clients left out of it) by the config's partition.

    Args:
      settings: config.partition, iid unless it names another; `unseen_clients` of the
        clients that it makes, drawn with its seed, are left out.

    Raises:
      ValueError: for a partition of faces, or one that leaves no test image or no
        client.
    """
    settings = {"name": "iid", **settings}
    num_unseen = settings.pop("unseen_clients", 0)
    parts = split(settings, source)
    if not isinstance(parts, ClientSplit):
        name = settings["name"]
        raise ValueError(f"config.partition.name must split classes, got {name!r}.")
    with naming("config.partition"):
        parts, unseen = leave_out(parts, num_unseen, seed=settings.get("seed", 0))
    if not len(parts.test):
        raise ValueError("config.partition must leave test images, got none.")
    return parts, unseen


def clients_of(source: Source, parts: ClientSplit, stream_bytes: int | None) -> Clients:
    """The images of a split's clients, on the host or streamed from the source."""
    num_clients = len(parts.train_offsets) - 1
    return Clients(
        train=table_of(source, parts.train, stream_bytes),
        population=Population(
            parts.train_offsets.astype(np.int64),
            np.full(num_clients, parts.num_classes, np.int32),
        ),
        test=table_of(source, parts.test, stream_bytes),
        test_offsets=parts.test_offsets,
    )


def table_of(source: Source, rows: np.ndarray, stream_bytes: int | None):
    """Images and labels of source rows [n], on the host or streamed from the source."""
    labels = source.labels[rows].astype(np.int32)
    if stream_bytes is None:
        return Dataset.labelled(source.read(rows), labels)
    return stream(lambda i: source.read(rows[i]), labels, memory=stream_bytes)
