"""FedFace's server: spreads the class embeddings out after every round.

Aggarwal, Zhou, Jain 2021, arXiv:2104.03008. A client uploads its class embeddings; the
server takes some steps on a spread-out penalty over all of the cohort's and hands each
client its own back when it trains next. Wraps an algorithm like `fedfr`, whose local
loss it leaves alone: FedFace's own is the `loss` class_hinge of the faces task, and
`init_head_from_class_means` its start. A client may hold many classes, FedFace's holds
one.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax.federated.aggregation.contract import on_inner
from fedfr_jax.types import Algorithm, PyTree


class SpreadServer(NamedTuple):
    """State of the inner algorithm's server plus every client's class embeddings."""

    inner: PyTree
    heads: jax.Array  # [N, M, D]
    is_known: jax.Array  # [N] bool, the client has uploaded


class ClientHead(NamedTuple):
    """Class embeddings that a client uploads."""

    client: jax.Array  # [] int32
    head: jax.Array  # [M, D]
    num_classes: jax.Array  # [] int32


def fedface(algorithm: Algorithm, spread: Callable, *, num_clients: int) -> Algorithm:
    """Wrap an algorithm so that the server spreads out the class embeddings.

    Args:
      algorithm: a `personal(...)` with the leaf params/head among its leaves.
      spread: (embeddings [K M, D], class_mask [K M]) -> embeddings [K M, D].
      num_clients: N.
    """
    if num_clients < 1:
        raise ValueError(f"num_clients must be at least 1, got {num_clients}.")
    if algorithm.privacy is not None:
        raise ValueError(
            "privacy must cover everything that clients send, got class embeddings "
            "that each client uploads for spreadout. Remove spreadout."
        )
    inside = on_inner(algorithm)

    def init(variables):
        server = algorithm.init(variables)
        row = jax.eval_shape(algorithm.init_personal, jax.random.key(0), server)
        head = row.leaves["params"]["head"]
        heads = jnp.zeros((num_clients, *head.shape), head.dtype)
        return SpreadServer(server, heads, jnp.zeros(num_clients, bool))

    def client_update(key, server, personal, client):
        params, client_id = personal.leaves["params"], client.id
        is_known, known_head = server.is_known[client_id], server.heads[client_id]
        params = {**params, "head": jnp.where(is_known, known_head, params["head"])}
        leaves = {**personal.leaves, "params": params}
        personal = personal._replace(leaves=leaves)
        output = inside.client_update(key, server, personal, client)
        head = output.personal.leaves["params"]["head"]
        return output._replace(
            per_client=ClientHead(client.id, head, client.num_classes)
        )

    def server_update(server, result):
        client, heads, num_classes = result.per_client
        place = jnp.arange(heads.shape[1], dtype=jnp.int32)
        mask = place[None] < num_classes[:, None]
        if result.is_received is not None:  # an id out of range writes nothing
            client = jnp.where(result.is_received, client, num_clients)
        moved = spread(heads.reshape(-1, heads.shape[2]), class_mask=mask.reshape(-1))
        return inside.server_update(server, result)._replace(
            heads=server.heads.at[client].set(moved.reshape(heads.shape)),
            is_known=server.is_known.at[client].set(True),
        )

    return inside._replace(
        init=init,
        client_update=client_update,
        server_update=server_update,
        built_for=(*algorithm.built_for, ("fedface", num_clients)),
    )
