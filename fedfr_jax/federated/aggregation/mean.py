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
    """Weighted mean sum_k w_k x_k / sum_k w_k, in float32 or more (FedAvg's).

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
    """Weighted mean [J, ...] for each of J server models, 0 for one without clients.

    A client's weights [J] are 0 for all models but one.
    """

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
    """Multiply `update` by `weight` [], in float32 or more."""
    return jax.tree.map(lambda x: wide(x) * weight.astype(wide(x).dtype), update)


def scale_weight(weight: PyTree, factor: jax.Array) -> PyTree:
    """Multiply a client's weight, of any algorithm, by `factor` []."""
    times = lambda x: x.astype(factor.dtype) * factor

    def scale(x):
        if is_scaled(x):
            return x._replace(tree=jax.tree.map(times, x.tree))
        return times(x)

    return jax.tree.map(scale, weight, is_leaf=is_scaled)


def wide(x: jax.Array) -> jax.Array:
    """Cast `x` to float32, unless it is wider."""
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def uniform(client: Client) -> jax.Array:
    """Weight 1: a mean over clients, not over examples."""
    del client
    return jnp.float32(1)


def by_num_examples(client: Client) -> jax.Array:
    """Weight n_k: the client's number of examples."""
    return client.num_examples.astype(jnp.float32)


WEIGHTS = {"num_examples": by_num_examples, "uniform": uniform}
Weighting = Literal["num_examples", "uniform"] | Callable


def weight_of(weighting: Weighting) -> Callable:
    """Weighting function client -> weight [], from a name in WEIGHTS or a function."""
    return weighting if callable(weighting) else WEIGHTS[weighting]
