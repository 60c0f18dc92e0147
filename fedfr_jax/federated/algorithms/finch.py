"""Clustered averaging by FINCH on features of public images.

Zhuang et al. 2022, arXiv:2205.12144, section 5.1 and algorithm 2: each round the server
groups clients by one step of FINCH (Sarfraz et al. 2019, arXiv:1902.11266, equation 1)
over the features of one public batch, averages inside each cluster, and a client
starts its next round from its cluster's network. Algorithm 2 prints that sum over all
clients; here it is over the cluster, as in the text. Clusters are known only after all
clients have trained, so a round needs the memory of K networks, and the server has one
for each of the N clients.
"""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated import variable_split
from fedfr_jax.federated.algorithms.cdw import training_weight
from fedfr_jax.federated.algorithms.ifca import cluster_model, mean_model
from fedfr_jax.federated.algorithms.public_data import (
    PublicImages,
    check_public_images,
    features_of_images,
)
from fedfr_jax.federated.engine import empty_prepared
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.ranges import Count
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, ClientOutput, LocalTraining, Model

MAX_PRECISION = jax.lax.Precision.HIGHEST
TINY = 1e-12


def first_neighbors(x: jax.Array, is_received: jax.Array | None = None) -> jax.Array:
    """Index [n] int32 of each row's first neighbor in x [n, D], by cosine.

    Rows that are not received, [n] bool, are no neighbors.
    """
    unit = x / jnp.maximum(jnp.linalg.norm(x, axis=1, keepdims=True), TINY)
    cosines = jnp.matmul(unit, unit.T, precision=MAX_PRECISION)
    similarity = jnp.where(jnp.eye(len(x), dtype=bool), -jnp.inf, cosines)
    if is_received is not None:
        similarity = jnp.where(is_received[None], similarity, -jnp.inf)
    return jnp.argmax(similarity, axis=1).astype(jnp.int32)


def first_neighbor_links(neighbors: jax.Array) -> jax.Array:
    """FINCH links [n, n]: one row is the other's first neighbor, or both share one."""
    number = jnp.arange(len(neighbors), dtype=jnp.int32)
    points = (neighbors[:, None] == number[None]) | (number[:, None] == number[None])
    return same_cluster(points, points.T)


def same_cluster(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether a path follows a link of `a`, then one of `b`, [n, n] bool each."""
    product = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32))
    return product > 0.5


def clusters(x: jax.Array, is_received: jax.Array | None = None) -> jax.Array:
    """Cluster index [n] int32 of each row of x [n, D]: connected components of links.

    The first partition of FINCH, numbered by first appearance.
    """
    reach = first_neighbor_links(first_neighbors(x, is_received))
    for _ in range(math.ceil(math.log2(max(len(x), 2)))):
        reach = same_cluster(reach, reach)
    first = jnp.argmax(reach, axis=1)
    is_first = first == jnp.arange(len(x), dtype=first.dtype)
    return (jnp.cumsum(is_first) - 1)[first].astype(jnp.int32)


@checked
def finch(
    local: LocalTraining,
    *,
    model: Model,
    shared: PublicImages,
    num_clients: Count,
    weighting: Literal["distance", "num_examples", "uniform"]
    | Callable = "num_examples",
    train_mode: bool = False,
) -> Algorithm:
    """Federated averaging within FINCH clusters; the global model is the clients' mean.

    Args:
      model: with `features`, of [b, D].
      shared: public images, of which a round uses the first batch.
      num_clients: N >= 1.
      weighting: distance, see `cdw`, or as of `fedavg`.
      train_mode: of networks that are weighed, see `cdw`.
    """
    check_public_images(model, shared)
    train, look = build_local_training(local), features_of_images(model, shared)
    weight = training_weight(weighting, model, train_mode)

    def init(variables):
        copies = lambda x: jnp.broadcast_to(x[None], (num_clients, *x.shape))
        return jax.tree.map(copies, variables)

    def prepare(models, context):
        del models
        return empty_prepared(len(context.cohort.ids))._replace(shared=shared.images)

    def client_update(key, models, cluster, client):
        start = cluster_model(models, client.id)
        end, metrics = train(key, start, client)
        share = weight(jax.random.fold_in(key, 1), start, end, client)
        network, step = variable_split.merge_personal_variables(end), jnp.int32(0)
        features = look(network, client.shared, client.round, step, key).reshape(-1)
        return ClientOutput(
            update=(),
            weight=share,
            personal=client.id,
            metrics=metrics,
            per_client=(client.id, variable_split.shared(end), features),
            personal_variables=variable_split.personal_variables(end),
        )

    def server_update(models, result):
        ids, ends, features = result.per_client
        group = clusters(features, result.is_received)
        share = jnp.where(group[:, None] == group[None], result.weights[None], 0)
        total = share.sum(axis=1, keepdims=True)
        if result.is_received is not None:  # an id out of range writes nothing
            ids = jnp.where(result.is_received, ids, num_clients)
            total = jnp.where(total > 0, total, 1)
        share = share / total

        def mean(x):
            shares = share.astype(x.dtype)
            return jnp.tensordot(shares, x, axes=1, precision=MAX_PRECISION)

        move = lambda x, end: x.at[ids].set(mean(end))
        return jax.tree.map(move, models, ends)

    def personalize(models, client):
        model = cluster_model(models, jnp.maximum(client, 0))
        return trees.where(client >= 0, model, mean_model(models))

    def report(models, result):
        group = clusters(result.per_client[2], result.is_received)
        return {"cluster": group.astype(jnp.float32)}

    return Algorithm(
        init=init,
        init_personal=lambda key, models: jnp.int32(-1),  # not known yet
        client_update=client_update,
        aggregator=None,
        server_update=server_update,
        personalize=personalize,
        global_model=mean_model,
        prepare=prepare,
        prepare_is_local=True,
        cohort_metrics=report,
        built_for=(("finch", num_clients),),
    )
