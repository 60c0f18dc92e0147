"""Weighted means of updates, streamed."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated.aggregation.contract import no_state
from fedfr_jax.federated.sums import is_scaled
from fedfr_jax.types import LAST, MEAN, Aggregator, Client, PyTree, Summary


def weighted_mean() -> Aggregator:
    """sum_k w_k x_k / sum_k w_k in at least float32 (McMahan et al. 2017, alg. 1).

    The weights of a cohort must not all be zero: then the mean is NaN, which the loop
    reports instead of training on.
    """

    def summarize(key, state, update, weight):
        del key, state
        return Summary(weighted(update, weight), weight), {}

    def finish(key, state, total):
        del key
        return trees.divide(total.update, total.weight), state, {}

    return Aggregator(no_state, summarize, finish, role=MEAN)


def cluster_mean() -> Aggregator:
    """A weighted mean [J, ...] for each of J server models, whose clients' weights [J]
    are 0 but for one; 0 for a model without clients."""

    def summarize(key, state, update, weight):
        del key, state

        def place(x):
            shares = weight.reshape(-1, *[1] * x.ndim)
            return wide(x)[None] * shares.astype(wide(x).dtype)

        return Summary(jax.tree.map(place, update), weight), {}

    def finish(key, state, total):
        del key

        def mean(x):
            # By the reciprocal, as `trees.divide`.
            weights = total.weight.reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype)
            return x * (1 / jnp.where(weights > 0, weights, 1))

        return jax.tree.map(mean, total.update), state, {}

    return Aggregator(no_state, summarize, finish, role=LAST)


def weighted(update: PyTree, weight: jax.Array) -> PyTree:
    """`update` times `weight` [], in at least float32."""
    return jax.tree.map(lambda x: wide(x) * weight.astype(wide(x).dtype), update)


def scale_weight(weight: PyTree, factor: jax.Array) -> PyTree:
    """Any algorithm's weight of a client times `factor` [], in the factor's dtype."""
    times = lambda x: x.astype(factor.dtype) * factor

    def one(x):
        if is_scaled(x):
            return x._replace(tree=jax.tree.map(times, x.tree))
        return times(x)

    return jax.tree.map(one, weight, is_leaf=is_scaled)


def wide(x: jax.Array) -> jax.Array:
    """`x` in float32, or as it is when already wider."""
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def uniform(client: Client) -> jax.Array:
    """Aggregation weight 1: the mean is over clients, not over examples."""
    del client
    return jnp.float32(1)


def by_num_examples(client: Client) -> jax.Array:
    """Aggregation weight n_k: the client's own examples."""
    return client.num_examples.astype(jnp.float32)


WEIGHTS = {"num_examples": by_num_examples, "uniform": uniform}
Weighting = Literal["num_examples", "uniform"] | Callable


def weight_of(weighting: Weighting) -> Callable:
    """A name of WEIGHTS, or a function, as client -> weight []."""
    return weighting if callable(weighting) else WEIGHTS[weighting]
