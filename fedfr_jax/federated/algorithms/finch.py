"""Clustered averaging: clients whose networks see public images alike share a network.

Zhuang et al. 2022, arXiv:2205.12144, section 5.1 and algorithm 2: each round the server
groups clients by one step of FINCH (Sarfraz et al. 2019, arXiv:1902.11266, equation 1)
over the features of one public batch, averages inside each cluster, and a client
starts its next round from its cluster's network. Algorithm 2 prints that sum over all
clients; here it is over the cluster, as the text says. Clusters are known when all have
ended, so a round holds K networks, and the server one for each of the N clients.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax.federated import collections
from fedfr_jax.federated.algorithms.cdw import training_weight
from fedfr_jax.federated.algorithms.clusters import of_group
from fedfr_jax.federated.algorithms.shared_images import (
    Shared,
    check_shared,
    features_on,
)
from fedfr_jax.federated.engine import no_extra
from fedfr_jax.federated.local import local_training
from fedfr_jax.schema import check_ranges
from fedfr_jax.types import Algorithm, ClientOutput, Local, Model

HIGHEST = jax.lax.Precision.HIGHEST
TINY = 1e-12


def first_neighbours(x: jax.Array) -> jax.Array:
    """Row [n] int32 of the largest cosine with each of x [n, D], itself left out."""
    unit = x / jnp.maximum(jnp.linalg.norm(x, axis=1, keepdims=True), TINY)
    cosines = jnp.matmul(unit, unit.T, precision=HIGHEST)
    others = jnp.where(jnp.eye(len(x), dtype=bool), -jnp.inf, cosines)
    return jnp.argmax(others, axis=1).astype(jnp.int32)


def linked(neighbours: jax.Array) -> jax.Array:
    """Whether rows [n, n] are each other's first neighbour, or share one."""
    number = jnp.arange(len(neighbours), dtype=jnp.int32)
    points = (neighbours[:, None] == number[None]) | (number[:, None] == number[None])
    return together(points, points.T)


def together(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether a path goes first along `a`, then along `b`, both [n, n] bool."""
    product = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32))
    return product > 0.5


def clusters(x: jax.Array) -> jax.Array:
    """Connected components of `linked` rows of x [n, D], [n] int32.

    The first partition of FINCH, numbered by first appearance.
    """
    reach = linked(first_neighbours(x))
    for _ in range(math.ceil(math.log2(max(len(x), 2)))):
        reach = together(reach, reach)
    first = jnp.argmax(reach, axis=1)
    is_first = first == jnp.arange(len(x), dtype=first.dtype)
    return (jnp.cumsum(is_first) - 1)[first].astype(jnp.int32)


def finch(
    local: Local,
    *,
    model: Model,
    shared: Shared,
    num_clients: int,
    weigh: str | Callable = "examples",
    train_mode: bool = False,
) -> Algorithm:
    """Federated averaging inside clusters; the judged network is the clients' mean.

    Args:
      model: with `features`, of [b, D].
      shared: public images, of which a round's first batch is looked at.
      num_clients: N >= 1.
      weigh: distance, see `cdw`, or as of `fedavg`.
      train_mode: of networks that are weighed, see `cdw`.

    Raises:
      ValueError: for images that do not fit, or without clients.
    """
    check_shared(model, shared)
    check_ranges("", {"num_clients": num_clients}, {"num_clients": (1, jnp.inf)})
    train, look = local_training(local), features_on(model, shared)
    weight = training_weight(weigh, model, train_mode)

    def init(variables):
        copies = lambda x: jnp.broadcast_to(x[None], (num_clients, *x.shape))
        return jax.tree.map(copies, variables)

    def prepare(models, context):
        del models
        return no_extra(len(context.cohort.ids))._replace(tables=shared.images)

    def client_update(key, models, known, client):
        start = of_group(models, client.id)
        end, metrics = train(key, start, client)
        share = weight(jax.random.fold_in(key, 1), start, end, client)
        network, step = collections.merged(end), jnp.int32(0)
        seen = look(network, client.tables, client.round, step, key).reshape(-1)
        upload, own = (client.id, collections.shared(end), seen), collections.own(end)
        return ClientOutput((), share, client.id, metrics, upload, own)

    def server_update(models, result):
        ids, ends, seen = result.upload
        group = clusters(seen)
        share = jnp.where(group[:, None] == group[None], result.weights[None], 0)
        share = share / share.sum(axis=1, keepdims=True)

        def mean(x):
            shares = share.astype(x.dtype)
            return jnp.tensordot(shares, x, axes=1, precision=HIGHEST)

        move = lambda x, end: x.at[ids].set(mean(end))
        return jax.tree.map(move, models, ends)

    def network(models):
        mean = jax.tree.map(lambda x: x.mean(0), collections.shared(models))
        return {**models, **mean}

    def personalize(models, known):
        own, everybody = of_group(models, jnp.maximum(known, 0)), network(models)
        return jax.tree.map(lambda a, b: jnp.where(known >= 0, a, b), own, everybody)

    def report(models, result):
        return {"cluster": clusters(result.upload[2]).astype(jnp.float32)}

    return Algorithm(
        init=init,
        init_personal=lambda key, models: jnp.int32(-1),  # not known yet
        client_update=client_update,
        aggregator=None,
        server_update=server_update,
        personalize=personalize,
        network=network,
        prepare=prepare,
        report=report,
    )
