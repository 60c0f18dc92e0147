"""Whose images are whose: clients of the federation, and clients it never sees."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedfr_jax.data.partition import ClientSplit
from fedfr_jax.federated.client import Population
from fedfr_jax.stream import Stream
from fedfr_jax.tasks.data import population_of, split_classes, table_of
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
      settings: config.partition, see `split_classes`; `unseen_clients` of the clients
        that it makes are left out.
    """
    settings = dict(settings)
    num_unseen = settings.pop("unseen_clients", 0)
    return split_classes(settings, source, num_unseen)


def clients_of(source: Source, parts: ClientSplit, stream_bytes: int | None) -> Clients:
    """The images of a split's clients, on the host or streamed from the source."""
    return Clients(
        train=table_of(source, parts.train, stream_bytes),
        population=population_of(parts, parts.num_classes),
        test=table_of(source, parts.test, stream_bytes),
        test_offsets=parts.test_offsets,
    )
