"""IFCA, HypCluster, FeSEM: several server models, trained by the clients that they fit.

IFCA, Ghosh et al. 2020, arXiv:2006.04088, algorithm 1 (model averaging): a client takes
the model of least loss over its examples and trains it. HypCluster, Mansour et al.
2020, arXiv:2002.10619, is the same with clients that count by examples. FeSEM, Xie et
al. 2021, arXiv:2005.01026, algorithm 1: a client trains the model of its group, then
joins the group whose model is nearest to it; a new client's group is drawn. A model
becomes the mean of its clients' models, in one streamed sum over [J, ...], or stays.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.federated import collections
from fedfr_jax.federated.aggregation.mean import equally, weight_of
from fedfr_jax.federated.algorithms.clusters import (
    clustered,
    num_groups,
    of_group,
    report,
)
from fedfr_jax.federated.local import local_training
from fedfr_jax.federated.means import over_examples
from fedfr_jax.objective import with_aux
from fedfr_jax.types import Algorithm, Local, PyTree


def nearest(models: PyTree, variables: PyTree) -> jax.Array:
    """Group [] int32 whose params are nearest to those of `variables`."""
    apart = lambda params: jax.tree.map(jnp.subtract, params, variables["params"])
    distance = lambda params: optax.tree.norm(apart(params), squared=True)
    return jnp.argmin(jax.vmap(distance)(models["params"])).astype(jnp.int32)


def ifca(
    local: Local,
    *,
    groups: int = 2,
    spread: float = 0.05,
    weigh: str | Callable = "equally",
) -> Algorithm:
    """Clustering by loss.

    Args:
      groups: J >= 1.
      spread: see `several`.
      weigh: see `fedavg`.
    """
    train, loss_fn = local_training(local), with_aux(local.loss)
    weight = weight_of(weigh)

    def client_update(key, models, group, client):
        del group
        network = lambda j: collections.merged(of_group(models, j))
        every = jnp.arange(num_groups(models), dtype=jnp.int32)
        losses_of = lambda batch: jax.lax.map(
            lambda j: loss_fn(network(j), batch, key)[0], every
        )
        group = jnp.argmin(over_examples(losses_of, client)).astype(jnp.int32)
        end, metrics = train(key, of_group(models, group), client)
        return report(models, group, end, metrics, weight(client))

    return clustered(client_update, groups, spread)


def hypcluster(local: Local, *, groups: int = 2, spread: float = 0.05) -> Algorithm:
    """`ifca` of clients that count by examples."""
    return ifca(local, groups=groups, spread=spread, weigh="examples")


def fesem(local: Local, *, groups: int = 2, spread: float = 0.05) -> Algorithm:
    """Multi-center federated learning: clustering by distance of params.

    Args:
      groups, spread: as for `ifca`.
    """
    train = local_training(local)

    def client_update(key, models, group, client):
        end, metrics = train(key, of_group(models, group), client)
        return report(models, nearest(models, end), end, metrics, equally(client))

    return clustered(client_update, groups, spread)
