"""Hierarchical federated learning: edge servers, averaged every few rounds.

    python examples/edge_servers.py

HierFAVG (Liu et al. 2020, arXiv:1905.06641) wraps an algorithm: an edge is its server
for some clients; every n rounds all edges get their average, weighted by clients.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedfr_jax as ff
from fedfr_jax.federated.aggregation.mean import cluster_mean


class Edges(NamedTuple):
    servers: Any  # [E, ...] of the algorithm's server
    weight: jax.Array  # [E] of clients since the last average


def with_edge_servers(algorithm, *, num_clients, num_edges, average_every):
    """Let the first N / E clients belong to the first edge, and so on."""

    def cloud(edges):
        weight = jnp.where(edges.weight.sum() > 0, edges.weight, 1.0)
        mean = lambda x: jnp.tensordot(weight / weight.sum(), x, axes=1)
        return jax.tree.map(mean, edges.servers)

    def to_edges(server):
        copy = lambda x: jnp.broadcast_to(x, (num_edges, *jnp.shape(x)))
        return Edges(jax.tree.map(copy, server), jnp.zeros(num_edges))

    def client_update(key, edges, personal, client):
        edge = jax.lax.div(client.id, jnp.int32(-(-num_clients // num_edges)))
        server = jax.tree.map(lambda x: x[edge], edges.servers)
        output = algorithm.client_update(key, server, personal, client)
        is_own = jnp.arange(num_edges, dtype=jnp.int32) == edge
        return output._replace(weight=jnp.where(is_own, output.weight, 0.0))

    def server_update(edges, result):
        def step(server, aggregate, weight):
            new = algorithm.server_update(server, result._replace(aggregate=aggregate))
            return jax.tree.map(lambda x, y: jnp.where(weight > 0, x, y), new, server)

        parts = edges.servers, result.aggregate, result.weights.sum(axis=0)
        edges = Edges(jax.vmap(step)(*parts), edges.weight + parts[2])
        is_due = jax.lax.rem(result.round + 1, jnp.int32(average_every)) == 0
        return jax.lax.cond(is_due, lambda x: to_edges(cloud(x)), lambda x: x, edges)

    return algorithm._replace(
        init=lambda variables: to_edges(algorithm.init(variables)),
        client_update=client_update,
        aggregator=cluster_mean(),
        server_update=server_update,
        personalize=lambda edges, row: algorithm.personalize(cloud(edges), row),
        global_model=lambda edges: algorithm.global_model(cloud(edges)),
    )


def loss_fn(variables, batch, key):
    logits = batch.images @ variables["params"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return jnp.where(batch.is_valid, losses, 0).sum() / batch.is_valid.sum()


if __name__ == "__main__":
    x = np.float32(np.random.default_rng(0).normal(size=(80, 5)))
    data = ff.FederatedDataset.from_client_ids(x, x.argmax(1), np.arange(80) % 8)
    fedavg = ff.fedavg(ff.LocalTraining(loss_fn, optax.sgd, 0.5))
    edges = with_edge_servers(fedavg, num_clients=8, num_edges=2, average_every=3)
    run = ff.init(edges, data, {"params": np.zeros((5, 5), np.float32)}, batch_size=5)
    for _ in range(6):
        run, _ = ff.run_round(run)
        apart = np.ptp(run.server.servers.variables["params"], axis=0)
        print("edges differ by", apart.max())
