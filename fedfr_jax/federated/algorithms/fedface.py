"""FedFace's server: push all clients' class embeddings apart after every round.

Aggarwal, Zhou, Jain 2021, arXiv:2104.03008. A client uploads its class embeddings; the
server takes some steps on a spread-out penalty over all of the cohort's and hands each
client its own back when it trains next. Wraps an algorithm like `fedfr`, whose local
loss it leaves alone: FedFace's own is `margin_loss` class_hinge of the faces task, and
`init_fc` its start. A client may hold many classes, FedFace's holds one.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax.federated.algorithms.fedfr import Server
from fedfr_jax.types import Algorithm, PyTree


class SpreadServer(NamedTuple):
    """FedFR's server, and every client's class embeddings."""

    backbone: PyTree
    phi: jax.Array  # [M_g, D]
    heads: jax.Array  # [N, M, D]
    is_known: jax.Array  # [N] bool, the client has uploaded


class Upload(NamedTuple):
    """What a client adds to its update."""

    client: jax.Array  # [] int32
    head: jax.Array  # [M, D]
    num_classes: jax.Array  # [] int32


def fedface(algorithm: Algorithm, spread: Callable, *, num_clients: int) -> Algorithm:
    """`algorithm` with class embeddings spread out by the server.

    Args:
      algorithm: `fedfr(...)`.
      spread: (embeddings [K M, D], class_mask [K M]) -> embeddings [K M, D].
      num_clients: N.

    Raises:
      ValueError: without clients.
    """
    if num_clients < 1:
        raise ValueError(f"num_clients must be at least 1, got {num_clients}.")
    inner = lambda server: Server(server.backbone, server.phi)

    def init(variables):
        server = algorithm.init(variables)
        row = jax.eval_shape(algorithm.init_personal, jax.random.key(0), server)
        head = row.params["head"]
        heads = jnp.zeros((num_clients, *head.shape), head.dtype)
        return SpreadServer(*server, heads, jnp.zeros(num_clients, bool))

    def client_update(key, server, personal, client):
        own = personal.params["head"]
        head = jnp.where(server.is_known[client.id], server.heads[client.id], own)
        personal = personal._replace(params={**personal.params, "head": head})
        output = algorithm.client_update(key, inner(server), personal, client)
        head = output.personal.params["head"]
        return output._replace(upload=Upload(client.id, head, client.num_classes))

    def server_update(server, result):
        new = algorithm.server_update(inner(server), result)
        client, heads, num_classes = result.upload
        place = jnp.arange(heads.shape[1], dtype=jnp.int32)
        mask = place[None] < num_classes[:, None]
        moved = spread(heads.reshape(-1, heads.shape[2]), class_mask=mask.reshape(-1))
        return SpreadServer(
            *new,
            server.heads.at[client].set(moved.reshape(heads.shape)),
            server.is_known.at[client].set(True),
        )

    return algorithm._replace(
        init=init,
        init_personal=lambda key, server: algorithm.init_personal(key, inner(server)),
        client_update=client_update,
        server_update=server_update,
        personalize=lambda server, row: algorithm.personalize(inner(server), row),
        network=lambda server: algorithm.network(inner(server)),
        update_like=inner,
    )
