"""Hierarchical federated learning: edge servers, averaged every few rounds.

HierFAVG (Liu et al. 2020, arXiv:1905.06641, algorithm 1): an edge server is a server of
the algorithm for its own clients; every n rounds the cloud averages the edges, weighted
by the sums of their clients' weights since the last average, and sends the average to
them. Deviations: a round's cohort is sampled from all clients, so an edge without a
client in it stays the same; the edges' optimizer states are averaged too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated.aggregation.contract import update_like
from fedfr_jax.federated.aggregation.mean import cluster_mean
from fedfr_jax.ranges import Count
from fedfr_jax.schema import checked
from fedfr_jax.types import MEAN, Algorithm, PyTree


class Edges(NamedTuple):
    """Server states of E edges."""

    servers: PyTree  # [E, ...] of the algorithm's server
    weight: jax.Array  # [E] of clients since the last average


class EdgeClient(NamedTuple):
    """Personal state of a client, with its edge."""

    edge: jax.Array  # [] int32, -1 before its first round
    inner: PyTree


@checked
def with_edge_servers(
    algorithm: Algorithm,
    *,
    num_clients: Count,
    num_edges: Count,
    average_every: Count = 1,
) -> Algorithm:
    """Run an algorithm on two levels.

    Clients are grouped by their numbers: the first N / E belong to the first edge.

    Args:
      num_clients: N.
      num_edges: E, at most N.
      average_every: rounds between averages of the edges.
    """
    if num_edges > num_clients:
        raise ValueError(f"num_edges must be in [1, {num_clients}], got {num_edges}.")
    if algorithm.aggregator is None or algorithm.aggregator.role != MEAN:
        raise ValueError(
            "an algorithm with edge servers must average updates by a plain mean, "
            f"got {algorithm}. Remove its `aggregation`."
        )
    per_edge = -(-num_clients // num_edges)

    def init(variables):
        copy = lambda x: jnp.broadcast_to(x, (num_edges, *jnp.shape(x)))
        server = algorithm.init(variables)
        return Edges(jax.tree.map(copy, server), jnp.zeros(num_edges))

    def init_personal(key, edges):
        inner = algorithm.init_personal(key, mean_server(edges))
        return EdgeClient(jnp.int32(-1), inner)

    def client_update(key, edges, row, client):
        edge = jax.lax.div(client.id, jnp.int32(per_edge))
        server = jax.tree.map(lambda x: x[edge], edges.servers)
        output = algorithm.client_update(key, server, row.inner, client)
        if jax.tree.leaves(output.sums):
            raise ValueError(
                "an algorithm with edge servers must sum only updates, got "
                f"{algorithm}. Use another one."
            )
        is_own = jnp.arange(num_edges, dtype=jnp.int32) == edge
        weight = jnp.asarray(output.weight, jnp.float32)
        return output._replace(
            weight=jnp.where(is_own, weight, 0),
            personal=EdgeClient(edge, output.personal),
        )

    def server_update(edges, result):
        weight = result.weights.sum(axis=0)

        def step(server, aggregate, weight):
            edge_result = result._replace(aggregate=aggregate)
            new_server = algorithm.server_update(server, edge_result)
            return trees.where(weight > 0, new_server, server)

        servers = jax.vmap(step)(edges.servers, result.aggregate, weight)
        edges = Edges(servers, edges.weight + weight)
        is_due = jax.lax.rem(result.round + 1, jnp.int32(average_every)) == 0
        return jax.lax.cond(is_due, averaged, lambda x: x, edges)

    def averaged(edges):
        is_heard = edges.weight.sum() > 0
        mean = mean_server(edges)
        copies = jax.tree.map(
            lambda x, y: jnp.broadcast_to(x, y.shape), mean, edges.servers
        )
        again = Edges(copies, jnp.zeros_like(edges.weight))
        return trees.where(is_heard, again, edges)

    def personalize(edges, row):
        edge_server = jax.tree.map(lambda x: x[jnp.maximum(row.edge, 0)], edges.servers)
        server = trees.where(row.edge >= 0, edge_server, mean_server(edges))
        return algorithm.personalize(server, row.inner)

    def prepare(edges, context):
        return algorithm.prepare(mean_server(edges), context)

    return algorithm._replace(
        init=init,
        init_personal=init_personal,
        client_update=client_update,
        aggregator=cluster_mean(),
        server_update=server_update,
        personalize=personalize,
        global_model=lambda edges: algorithm.global_model(mean_server(edges)),
        prepare=prepare if algorithm.prepare else None,
        update_like=lambda edges: update_like(algorithm, mean_server(edges)),
        built_for=(*algorithm.built_for, ("with_edge_servers", num_clients)),
    )


def mean_server(edges: Edges) -> PyTree:
    """Mean of the edges, weighted by their clients; unweighted before any training."""
    total = edges.weight.sum()
    even = jnp.full_like(edges.weight, 1 / len(edges.weight))
    share = jnp.where(total > 0, edges.weight / jnp.where(total > 0, total, 1), even)

    def mean(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x[0]  # a counter, the same on every edge
        return jnp.tensordot(share.astype(x.dtype), x, axes=1)

    return jax.tree.map(mean, edges.servers)
