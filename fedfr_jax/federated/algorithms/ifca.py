"""IFCA and FeSEM: several server models, each trained by the clients that it fits.

IFCA, Ghosh et al. 2020, arXiv:2006.04088, algorithm 1 (model averaging): a client takes
the model of least loss over its examples and trains it. FeSEM, Xie et al. 2021,
arXiv:2005.01026, algorithm 1: a client trains the model of its group, then joins the
group whose model is nearest to it; a new client's group is drawn. A model becomes the
equal mean of its clients' models, in one streamed sum over [J, ...], or stays.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedfr_jax.federated.algorithms.aggregators import plain_sum
from fedfr_jax.federated.means import over_examples
from fedfr_jax.types import Algorithm, ClientOutput, PyTree


def num_groups(models: PyTree) -> int:
    """J of `models` [J, ...]."""
    return len(jax.tree.leaves(models)[0])


def of_group(models: PyTree, group: jax.Array) -> PyTree:
    """Model `group` [] of `models` [J, ...]."""
    return jax.tree.map(lambda x: x[group], models)


def nearest(models: PyTree, variables: PyTree) -> jax.Array:
    """Group [] int32 whose params are nearest to those of `variables`."""
    apart = lambda params: jax.tree.map(jnp.subtract, params, variables["params"])
    distance = lambda params: optax.tree.norm(apart(params), squared=True)
    return jnp.argmin(jax.vmap(distance)(models["params"])).astype(jnp.int32)


def ifca(train: Callable, loss_fn: Callable) -> Algorithm:
    """Clustering by loss; `train` is `local_sgd(...)` of the same `loss_fn`."""

    def client_update(key, models, group, client):
        del group
        losses_of = lambda batch: jax.lax.map(
            lambda variables: loss_fn(variables, batch, key)[0], models
        )
        group = jnp.argmin(over_examples(losses_of, client)).astype(jnp.int32)
        end, metrics = train(key, of_group(models, group), client)
        return report(models, group, end, metrics)

    return clustered(client_update)


def fesem(train: Callable) -> Algorithm:
    """Multi-center federated learning: clustering by distance of params."""

    def client_update(key, models, group, client):
        end, metrics = train(key, of_group(models, group), client)
        return report(models, nearest(models, end), end, metrics)

    return clustered(client_update)


def clustered(client_update: Callable) -> Algorithm:
    """J models, of which each client remembers one.

    The `variables` of `init` are stacked [J, ...] and must differ between groups.
    """

    draw = lambda key, models: jax.random.randint(
        key, (), 0, num_groups(models), jnp.int32
    )

    def server_update(models, result):
        change, count = result.aggregate

        def move(x, d):
            # By the reciprocal, as `trees.divided`.
            members = count.reshape(-1, *[1] * (x.ndim - 1)).astype(d.dtype)
            return x + (d * (1 / jnp.maximum(members, 1))).astype(x.dtype)

        return jax.tree.map(move, models, change)

    return Algorithm(
        init=lambda models: models,
        init_personal=draw,
        client_update=client_update,
        aggregator=plain_sum(),
        server_update=server_update,
        personalize=of_group,
    )


def report(models: PyTree, group: jax.Array, end: PyTree, metrics) -> ClientOutput:
    """A client's change in its group's place of [J, ...], zero in the others."""
    place = lambda x, y: jnp.zeros_like(x).at[group].set(y - x[group])
    members = jnp.zeros(num_groups(models), jnp.float32).at[group].set(1)
    update = (jax.tree.map(place, models, end), members)
    metrics = {**metrics, "group": group.astype(jnp.float32)}
    return ClientOutput(update, jnp.float32(1), group, metrics)
