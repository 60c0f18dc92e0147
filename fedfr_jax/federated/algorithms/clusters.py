"""Clusters of clients, each with a model: IFCA, HypCluster, FeSEM, FINCH.

IFCA, HypCluster and FeSEM have J models; one becomes the mean of its clients' models,
in one streamed sum over [J, ...], or stays. FINCH has one for each client, and finds
the clusters in every round. The global model is the models' mean.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedfr_jax import trees
from fedfr_jax.aux_loss import as_aux_loss
from fedfr_jax.federated import variable_split
from fedfr_jax.federated.aggregation.mean import (
    Weighting,
    cluster_mean,
    uniform,
    weight_of,
)
from fedfr_jax.federated.algorithms.fedreid import (
    DistanceWeighting,
    PublicImages,
    features_of_images,
    training_weight,
    unit_rows,
)
from fedfr_jax.federated.dataset_means import over_examples
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.ranges import Count, NonNegative
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, ClientOutput, LocalTraining, Model, PyTree


def count_clusters(models: PyTree) -> int:
    """Number of server models, J, of `models` [J, ...]."""
    return len(jax.tree.leaves(variable_split.shared(models))[0])


def cluster_model(models: PyTree, group: jax.Array) -> PyTree:
    """Server model `group` [] of `models` [J, ...], with the personal leaves."""
    model = jax.tree.map(lambda x: x[group], variable_split.shared(models))
    return {**models, **model}


def mean_model(models: PyTree) -> PyTree:
    """Mean of the server models `models` [J, ...], with the personal leaves."""
    mean = jax.tree.map(lambda x: x.mean(0), variable_split.shared(models))
    return {**models, **mean}


def copies(tree: PyTree, count: int) -> PyTree:
    """Stack `count` copies of every leaf, [count, ...]."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (count, *x.shape)), tree)


def build_clustered(
    client_update: Callable, num_clusters: int, init_noise: float
) -> Algorithm:
    """Build an algorithm with J server models.

    Args:
      init_noise: the models start with normal noise on the params of so many standard
        deviations of each leaf.
    """

    def init(variables):
        random = np.random.default_rng(0)

        def with_noise(x):
            noise = random.standard_normal((num_clusters, *x.shape)).astype(x.dtype)
            return x[None] + init_noise * jnp.std(x) * noise

        params = jax.tree.map(with_noise, variables["params"])
        stats = copies(variables["batch_stats"], num_clusters)
        return {"params": params, "batch_stats": stats}

    def init_personal(key, models):
        return jax.random.randint(key, (), 0, count_clusters(models), jnp.int32)

    def update_like(models):
        raise ValueError(
            "aggregation cannot have a link with a center, such as centered_clip or "
            f"rfa, with several server models, got {count_clusters(models)} models."
        )

    return Algorithm(
        init=init,
        init_personal=init_personal,
        client_update=client_update,
        aggregator=cluster_mean(),
        server_update=lambda models, result: trees.add(models, result.aggregate),
        personalize=cluster_model,
        global_model=mean_model,
        has_global_model=False,
        update_like=update_like,
    )


def cluster_output(
    models: PyTree, group: jax.Array, end: PyTree, metrics: PyTree, weight: jax.Array
) -> ClientOutput:
    """Output of a client in `group` []: its update to that model, and metrics."""
    metrics = {**metrics, "cluster": group.astype(jnp.float32)}
    weights = jnp.zeros(count_clusters(models), weight.dtype).at[group].set(weight)
    start = cluster_model(models, group)
    return variable_split.client_output(start, end, weights, group, metrics)


@checked
def ifca(
    local: LocalTraining,
    *,
    num_clusters: Count = 2,
    init_noise: NonNegative = 0.05,
    weighting: Weighting = "uniform",
) -> Algorithm:
    """IFCA: clustering by loss.

    Ghosh et al. 2020, arXiv:2006.04088, algorithm 1 (model averaging): a client takes
    the one of J models with the least loss over its examples, and trains it.

    Args:
      num_clusters: J.
      init_noise: see `build_clustered`.
      weighting: see `fedavg`.
    """
    train, loss_fn = build_local_training(local), as_aux_loss(local.loss)
    weight = weight_of(weighting)

    def client_update(key, models, group, client):
        del group
        clusters = jnp.arange(count_clusters(models), dtype=jnp.int32)

        def losses_of(batch):
            def loss_of(j):
                model = cluster_model(models, j)
                network = variable_split.whole_variables(model)
                return loss_fn(network, batch, key)[0]

            return jax.lax.map(loss_of, clusters)

        group = jnp.argmin(over_examples(losses_of, client)).astype(jnp.int32)
        end, metrics = train(key, cluster_model(models, group), client)
        return cluster_output(models, group, end, metrics, weight(client))

    return build_clustered(client_update, num_clusters, init_noise)


@checked
def hypcluster(
    local: LocalTraining, *, num_clusters: Count = 2, init_noise: NonNegative = 0.05
) -> Algorithm:
    """HypCluster: `ifca` with clients weighted by examples.

    Mansour et al. 2020, arXiv:2002.10619.
    """
    sizes = {"num_clusters": num_clusters, "init_noise": init_noise}
    return ifca(local, **sizes, weighting="num_examples")


@checked
def fesem(
    local: LocalTraining, *, num_clusters: Count = 2, init_noise: NonNegative = 0.05
) -> Algorithm:
    """FeSEM: clustering by distance of params.

    Xie et al. 2021, arXiv:2005.01026, algorithm 1: a client trains the model of its
    cluster, then joins the cluster whose model is nearest; a new client's is random.

    Args:
      num_clusters, init_noise: as for `ifca`.
    """
    train = build_local_training(local)

    def client_update(key, models, group, client):
        end, metrics = train(key, cluster_model(models, group), client)

        def distance(params):
            apart = jax.tree.map(jnp.subtract, params, end["params"])
            return optax.tree.norm(apart, squared=True)

        group = jnp.argmin(jax.vmap(distance)(models["params"])).astype(jnp.int32)
        return cluster_output(models, group, end, metrics, uniform(client))

    return build_clustered(client_update, num_clusters, init_noise)


def first_neighbors(x: jax.Array, is_received: jax.Array | None = None) -> jax.Array:
    """Index [n] int32 of each row's first neighbor in x [n, D], by cosine.

    Rows that are not received, [n] bool, are no neighbors.
    """
    unit = unit_rows(x)
    cosines = jnp.matmul(unit, unit.T, precision="highest")
    similarity = jnp.where(jnp.eye(len(x), dtype=bool), -jnp.inf, cosines)
    if is_received is not None:
        similarity = jnp.where(is_received[None], similarity, -jnp.inf)
    return jnp.argmax(similarity, axis=1).astype(jnp.int32)


def first_neighbor_links(neighbors: jax.Array) -> jax.Array:
    """FINCH links [n, n]: one row is the other's first neighbor, or both share one."""
    number = jnp.arange(len(neighbors), dtype=jnp.int32)
    points = (neighbors[:, None] == number[None]) | (number[:, None] == number[None])
    return are_linked(points, points.T)


def are_linked(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether a path follows a link of `a`, then one of `b`, [n, n] bool each."""
    return jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32)) > 0.5


def find_clusters(x: jax.Array, is_received: jax.Array | None = None) -> jax.Array:
    """Cluster index [n] int32 of each row of x [n, D]: connected components of links.

    The first partition of FINCH, numbered by first appearance.
    """
    reach = first_neighbor_links(first_neighbors(x, is_received))
    for _ in range(math.ceil(math.log2(max(len(x), 2)))):
        reach = are_linked(reach, reach)
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
    weighting: DistanceWeighting = "num_examples",
) -> Algorithm:
    """Federated averaging within FINCH clusters, by features of public images.

    Zhuang et al. 2022, arXiv:2205.12144, section 5.1 and algorithm 2: each round the
    server groups clients by one step of FINCH (Sarfraz et al. 2019, arXiv:1902.11266,
    equation 1) over the features of one public batch, averages inside each cluster, and
    a client starts its next round from its cluster's network. Algorithm 2 prints that
    sum over all clients; here it is over the cluster, as in the text. Clusters are
    known only after all clients have trained, so a round needs the memory of K
    networks, and the server has one for each of the N clients.

    Args:
      model: with `features`, of [b, D].
      shared: public images, of which a round uses the first batch.
      num_clients: N.
      weighting: distance, see `cdw`, or as of `fedavg`.
    """
    train, look = build_local_training(local), features_of_images(model, shared)
    weight = training_weight(weighting, model)

    def client_update(key, models, cluster, client):
        del cluster
        start = cluster_model(models, client.id)
        end, metrics = train(key, start, client)
        network = variable_split.whole_variables(end)
        features = look(network, client.shared, client.round, jnp.int32(0))
        return ClientOutput(
            update=(),
            weight=weight(start, end, client),
            personal=client.id,
            metrics=metrics,
            per_client=(client.id, variable_split.shared(end), features.reshape(-1)),
            personal_variables=variable_split.personal_variables(end),
        )

    def server_update(models, result):
        ids, ends, features = result.per_client
        group = find_clusters(features, result.is_received)
        share = jnp.where(group[:, None] == group[None], result.weights[None], 0)
        total = share.sum(axis=1, keepdims=True)
        if result.is_received is not None:  # an id out of range writes nothing
            ids = jnp.where(result.is_received, ids, num_clients)
            total = jnp.where(total > 0, total, 1)
        share = share / total

        def move(x, end):
            shares = share.astype(end.dtype)
            mean = jnp.tensordot(shares, end, axes=1, precision="highest")
            return x.at[ids].set(mean)

        return jax.tree.map(move, models, ends)

    def personalize(models, client):
        model = cluster_model(models, jnp.maximum(client, 0))
        return trees.where(client >= 0, model, mean_model(models))

    def report(models, result):
        group = find_clusters(result.per_client[2], result.is_received)
        return {"cluster": group.astype(jnp.float32)}

    return Algorithm(
        init=lambda variables: copies(variables, num_clients),
        init_personal=lambda key, models: jnp.int32(-1),  # not known yet
        client_update=client_update,
        aggregator=None,
        server_update=server_update,
        personalize=personalize,
        global_model=mean_model,
        prepare=shared.prepare,
        prepare_is_local=True,
        cohort_metrics=report,
        built_for=(("finch", num_clients),),
    )
