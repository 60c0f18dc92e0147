"""Clustered federated learning with several server models: IFCA, HypCluster, FeSEM.

IFCA, Ghosh et al. 2020, arXiv:2006.04088, algorithm 1 (model averaging): a client takes
the one of J models with the least loss over its examples, and trains it. HypCluster,
Mansour et al. 2020, arXiv:2002.10619, is the same with clients weighted by examples.
FeSEM, Xie et al. 2021, arXiv:2005.01026, algorithm 1: a client trains the model of its
cluster, then joins the cluster whose model is nearest; a new client's is random. A
model becomes the mean of its clients' models, in one streamed sum over [J, ...], or
stays.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedfr_jax import trees
from fedfr_jax.federated import variable_split
from fedfr_jax.federated.aggregation.mean import (
    Weighting,
    cluster_mean,
    uniform,
    weight_of,
)
from fedfr_jax.federated.dataset_means import over_examples
from fedfr_jax.federated.local import build_local_training
from fedfr_jax.ranges import Count, NonNegative
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, ClientOutput, LocalTraining, PyTree, as_aux_loss


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


def perturbed_copies(variables: PyTree, num_clusters: int, init_noise: float) -> PyTree:
    """Stack `num_clusters` copies [J, ...] of variables, with noise on the params.

    Normal noise of `init_noise` times the standard deviation of each leaf is added.
    """
    random = np.random.default_rng(0)

    def stack(x):
        noise = random.standard_normal((num_clusters, *x.shape)).astype(x.dtype)
        return x[None] + init_noise * jnp.std(x) * noise

    copy = lambda x: jnp.broadcast_to(x[None], (num_clusters, *x.shape))
    return {
        "params": jax.tree.map(stack, variables["params"]),
        "batch_stats": jax.tree.map(copy, variables["batch_stats"]),
    }


def build_clustered(
    client_update: Callable, num_clusters: int, init_noise: float
) -> Algorithm:
    """Build an algorithm with J server models; the global model is their mean."""

    def draw(key, models):
        return jax.random.randint(key, (), 0, count_clusters(models), jnp.int32)

    return Algorithm(
        init=lambda variables: perturbed_copies(variables, num_clusters, init_noise),
        init_personal=draw,
        client_update=client_update,
        aggregator=cluster_mean(),
        server_update=lambda models, result: trees.add(models, result.aggregate),
        personalize=cluster_model,
        global_model=mean_model,
        has_global_model=False,
        update_like=only_one,
    )


def only_one(models: PyTree) -> PyTree:
    """Raise ValueError for links with state, which needs a single server model."""
    raise ValueError(
        "aggregation cannot have a link with a center, such as centered_clip or "
        f"rfa, with several server models, got {count_clusters(models)} models."
    )


def cluster_metrics(
    models: PyTree, group: jax.Array, end: PyTree, metrics: PyTree, weight: jax.Array
) -> ClientOutput:
    """Output of a client in `group` []: its update to that model, and metrics."""
    metrics = {**metrics, "cluster": group.astype(jnp.float32)}
    weights = jnp.zeros(count_clusters(models), weight.dtype).at[group].set(weight)
    start = cluster_model(models, group)
    return variable_split.client_output(start, end, weights, group, metrics)


def nearest_model(models: PyTree, variables: PyTree) -> jax.Array:
    """Index [] int32 of the server model with params nearest to `variables`."""
    apart = lambda params: jax.tree.map(jnp.subtract, params, variables["params"])
    distance = lambda params: optax.tree.norm(apart(params), squared=True)
    return jnp.argmin(jax.vmap(distance)(models["params"])).astype(jnp.int32)


@checked
def ifca(
    local: LocalTraining,
    *,
    num_clusters: Count = 2,
    init_noise: NonNegative = 0.05,
    weighting: Weighting = "uniform",
) -> Algorithm:
    """IFCA: clustering by loss.

    Args:
      num_clusters: J >= 1.
      init_noise: see `perturbed_copies`.
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
                network = variable_split.merge_personal_variables(model)
                return loss_fn(network, batch, key)[0]

            return jax.lax.map(loss_of, clusters)

        group = jnp.argmin(over_examples(losses_of, client)).astype(jnp.int32)
        end, metrics = train(key, cluster_model(models, group), client)
        return cluster_metrics(models, group, end, metrics, weight(client))

    return build_clustered(client_update, num_clusters, init_noise)


@checked
def hypcluster(
    local: LocalTraining, *, num_clusters: Count = 2, init_noise: NonNegative = 0.05
) -> Algorithm:
    """HypCluster: `ifca` with clients weighted by examples."""
    return ifca(
        local,
        num_clusters=num_clusters,
        init_noise=init_noise,
        weighting="num_examples",
    )


@checked
def fesem(
    local: LocalTraining, *, num_clusters: Count = 2, init_noise: NonNegative = 0.05
) -> Algorithm:
    """FeSEM: clustering by distance of params.

    Args:
      num_clusters, init_noise: as for `ifca`.
    """
    train = build_local_training(local)

    def client_update(key, models, group, client):
        end, metrics = train(key, cluster_model(models, group), client)
        return cluster_metrics(
            models, nearest_model(models, end), end, metrics, uniform(client)
        )

    return build_clustered(client_update, num_clusters, init_noise)
