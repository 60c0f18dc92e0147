"""Mixing of all clients' updates before aggregation: neighbors, buckets, clipping.

The links after one of these receive mixed or clipped updates:
`chain(nearest_neighbor_mixing(num_malicious_clients=2), median())`. They need the
updates of all K clients at once and keep K models. Rows count equally. A client whose
update has nan or infinity is left out, and K counts the others.
"""

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated.aggregation.clip import clip
from fedfr_jax.federated.aggregation.contract import split
from fedfr_jax.federated.aggregation.robust import masked, push_apart, squared_distances
from fedfr_jax.ranges import Count
from fedfr_jax.schema import checked
from fedfr_jax.types import Aggregator


@checked
def nearest_neighbor_mixing(*, num_malicious_clients: Count = 1) -> Aggregator:
    """Replace every update by the mean of its K - f nearest updates, itself included.

    Allouah et al. 2023, arXiv:2302.01772, algorithm 2 (NNM). Running statistics are
    mixed by the same neighbors.

    Args:
      num_malicious_clients: f >= 1; K > 2 f.
    """
    f = num_malicious_clients

    def mix(key, updates, weights):
        del key
        is_kept = weights > 0
        change, _, _ = split(updates)
        distances = push_apart(squared_distances(change), ~is_kept)
        number = jnp.maximum(is_kept.sum() - f, 1)
        rank = jnp.argsort(jnp.argsort(distances, axis=1), axis=1)
        return average(rank < number, updates), jnp.where(is_kept, 1.0, 0.0)

    bound = lambda number: f
    return Aggregator(mix=mix, min_clients=2 * f + 1, max_malicious=bound)


@checked
def bucketing(*, clients_per_bucket: Count = 2) -> Aggregator:
    """Replace the updates by means of random groups of s updates.

    Karimireddy, He, Jaggi 2022, arXiv:2006.09365, algorithm 1. The links behind
    it see ceil(K / s) rows, of which as many as before may be malicious.

    Args:
      clients_per_bucket: s >= 1; the last bucket may have fewer.
    """
    size = clients_per_bucket

    def mix(key, updates, weights):
        is_kept, number = weights > 0, len(weights)
        # Clients that are left out come last, so that no other bucket lacks one.
        order = jnp.argsort(jnp.where(is_kept, jax.random.uniform(key, (number,)), 2))
        place = jnp.argsort(order)
        buckets = jnp.arange(-(-number // size), dtype=place.dtype)
        is_in = (place[None] // size == buckets[:, None]) & is_kept[None]
        return average(is_in, updates), jnp.where(is_in.any(axis=1), 1.0, 0.0)

    return Aggregator(mix=mix, clients_per_row=size)


@checked
def adaptive_robust_clipping(*, num_malicious_clients: Count = 1) -> Aggregator:
    """Clip the floor(2 f (K - f) / K) longest updates to the next norm.

    Allouah et al. 2024, arXiv:2405.14432, algorithm 2 (ARC). Norms are of everything
    that is trained together; running statistics stay.

    Args:
      num_malicious_clients: f >= 1; K > 2 f.
    """
    f = num_malicious_clients

    def mix(key, updates, weights):
        del key
        is_kept = weights > 0
        change, statistics, join = split(updates)
        norms = jax.vmap(trees.norm)(change)
        falling = jnp.sort(jnp.where(is_kept, norms, -1), descending=True)
        count = is_kept.sum()
        num_clipped = 2 * f * (count - f) // jnp.maximum(count, 1)
        bound = falling[jnp.clip(num_clipped, 0, len(norms) - 1)]
        clipped, _ = jax.vmap(lambda x: clip(x, bound))(change)
        return join(clipped, statistics), jnp.where(is_kept, 1.0, 0.0)

    bound = lambda number: f
    return Aggregator(mix=mix, min_clients=2 * f + 1, max_malicious=bound)


def average(is_in: jax.Array, updates):
    """Means [R, ...] of updates [K, ...] over the clients of each row of is_in [R, K].

    A row without clients is 0.
    """
    is_in = is_in.astype(jnp.result_type(float))
    share = is_in / jnp.maximum(is_in.sum(axis=1, keepdims=True), 1)
    mean = lambda x: jnp.tensordot(share.astype(x.dtype), x, axes=1)
    return jax.tree.map(mean, masked(is_in.sum(axis=0) > 0, updates))
