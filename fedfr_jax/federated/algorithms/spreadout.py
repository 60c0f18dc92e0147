"""Servers that spread class vectors out after every round: FedAwS and FedFace."""

from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Interval

from fedfr_jax import trees
from fedfr_jax.federated.aggregation.contract import on_inner
from fedfr_jax.federated.aggregation.mean import Weighting
from fedfr_jax.federated.algorithms.fedavg import fedavg
from fedfr_jax.ranges import Count, NonNegative
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, LocalTraining, PyTree

Distance = Annotated[float, Interval(ge=0, le=2)]  # of two cosines


@checked
def fedaws(
    local: LocalTraining,
    *,
    spreadout: Callable,
    classes: str,
    margin: Distance = 0.9,
    lam: NonNegative = 10.0,
    server_learning_rate: NonNegative = 0.1,
    weighting: Weighting = "num_examples",
) -> Algorithm:
    """FedAwS: FedAvg, then a server step that spreads out the class vectors.

    Yu, Rawat, Menon, Kumar 2020, arXiv:2004.10342, algorithm 1: one class per client;
    clients pull features to the row of their own class
    (`class_pull` of classification), and after averaging the server steps down
    server_learning_rate * lam * grad sum_{c != c'} max(0, margin - d(w_c, w_c'))^2
    with d = 1 - cosine. Of a classifier's kernel [D, M] the rows are the columns.

    Args:
      local: the paper's loss is `class_pull`; others work too.
      spreadout: (rows [M, D], margin=cosine from which two are too near) -> [].
      classes: regular expression that matches one leaf [D, M].
      margin: least distance of two classes.
      lam, server_learning_rate: lambda and eta, whose product is the step.
      weighting: see `fedavg`.
    """
    base, select = fedavg(local, weighting=weighting), trees.matching(classes)
    gradient = jax.grad(lambda kernel: spreadout(kernel.T, margin=1 - margin))

    def init(variables):
        is_chosen, leaves = map(jax.tree.leaves, (select(variables), variables))
        shapes = [x.shape for m, x in zip(is_chosen, leaves, strict=True) if m]
        if len(shapes) != 1 or len(shapes[0]) != 2:
            raise ValueError(f"classes must match one leaf [D, M], got {shapes}.")
        return base.init(variables)

    def server_update(server, result):
        server = base.server_update(server, result)

        def apart(is_chosen, x):
            return x - lam * server_learning_rate * gradient(x) if is_chosen else x

        moved = jax.tree.map(apart, select(server.variables), server.variables)
        return server._replace(variables=moved)

    return base._replace(
        init=init, server_update=server_update, needs=("class_pull_loss",)
    )


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


@checked
def fedface(algorithm: Algorithm, spread: Callable, *, num_clients: Count) -> Algorithm:
    """FedFace: wrap an algorithm so that the server spreads out class embeddings.

    Aggarwal, Zhou, Jain 2021, arXiv:2104.03008. A client uploads its class embeddings;
    the server takes some steps on a spread-out penalty over all of the cohort's and
    returns each client its own when it trains next. The local loss is left alone:
    FedFace's own is the `loss` class_hinge of the faces task, and
    `init_head_from_class_means` its start. A client may hold many classes, FedFace's
    holds one.

    Args:
      algorithm: a `personal(...)` with the leaf params/head among its leaves.
      spread: (embeddings [K M, D], class_mask [K M]) -> embeddings [K M, D].
      num_clients: N.
    """
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
        params, leaves = personal.leaves["params"], personal.leaves
        is_known, known_head = server.is_known[client.id], server.heads[client.id]
        params = {**params, "head": jnp.where(is_known, known_head, params["head"])}
        personal = personal._replace(leaves={**leaves, "params": params})
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
