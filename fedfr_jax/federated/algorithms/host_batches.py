"""Batches whose order is computed on the host, for any algorithm.

For an order that the device could only find step by step, such as that of batches
balanced over identities. The lists of a cohort are made before a round, in addition to
what the algorithm itself prepares.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.types import Algorithm, AnyArray, PyTree


class HostBatches(NamedTuple):
    """`Prepared.shared` of the algorithm, and the order of its clients' examples."""

    inner: PyTree
    positions: AnyArray  # [K, S, B] int32 in each client's list of examples


def with_host_batches(algorithm: Algorithm, order: Callable) -> Algorithm:
    """Let an algorithm's clients take the examples of `order` in each step.

    Args:
      order: (client, round) -> [S, B] int32 positions in the client's list of examples,
        on the host; B is the feed's batch, S at least the steps of any client and the
        same for all, so that a round compiles once.
    """

    def prepare(server, context):
        cohort = context.cohort
        extra = empty_prepared(len(cohort.ids))
        if algorithm.prepare:
            extra = algorithm.prepare(server, context)
        ids = np.asarray(cohort.ids).tolist()
        positions = np.stack([order(client, cohort.round) for client in ids])
        return extra._replace(shared=HostBatches(extra.shared, positions))

    def client_update(key, server, personal, client):
        inner, positions = client.shared
        client_positions = positions[client.cohort_index]
        batch = lambda step: client.batch_at(step, client_positions[step])
        client = client._replace(batch=batch, shared=inner)
        return algorithm.client_update(key, server, personal, client)

    def server_update(server, result):
        result = result._replace(shared=result.shared.inner)
        return algorithm.server_update(server, result)

    return algorithm._replace(
        prepare=prepare,
        prepare_is_local=algorithm.prepare is None or algorithm.prepare_is_local,
        client_update=client_update,
        server_update=server_update,
    )
