"""Means of updates, streamed: by weights, of clusters, and by attention.

Attention is a softmax over clients of numbers that a client can compute alone. It sends
a `LogScaled` summary; the weights follow from the sums.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated.aggregation.contract import split
from fedfr_jax.federated.sums import is_scaled
from fedfr_jax.ranges import NonNegative
from fedfr_jax.schema import checked
from fedfr_jax.types import (
    LAST,
    MEAN,
    Aggregator,
    Client,
    LogScaled,
    PyTree,
    Summary,
)


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

    return Aggregator(summarize=summarize, finish=finish, role=MEAN)


def cluster_mean() -> Aggregator:
    """Weighted mean [J, ...] for each of J server models, 0 for one without clients.

    A client's weights [J] are 0 for all models but one.
    """

    def summarize(key, state, update, weight):
        del key, state

        def place(x):
            shares = weight.reshape(-1, *[1] * x.ndim)
            return to_float32(x)[None] * shares.astype(to_float32(x).dtype)

        return Summary(jax.tree.map(place, update), weight), {}

    def finish(key, state, total):
        del key

        def mean(x):
            # By the reciprocal, as `trees.divide`.
            weights = total.weight.reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype)
            return x * (1 / jnp.where(weights > 0, weights, 1))

        return jax.tree.map(mean, total.update), state, {}

    return Aggregator(summarize=summarize, finish=finish, role=LAST)


def weighted(update: PyTree, weight: jax.Array) -> PyTree:
    """Multiply `update` by `weight` [], in float32 or more."""

    def scale(x):
        x = to_float32(x)
        return x * weight.astype(x.dtype)

    return jax.tree.map(scale, update)


def scale_weight(weight: PyTree, factor: jax.Array) -> PyTree:
    """Multiply a client's weight, of any algorithm, by `factor` []."""
    times = lambda x: x.astype(factor.dtype) * factor

    def scale(x):
        if is_scaled(x):
            return x._replace(tree=jax.tree.map(times, x.tree))
        return times(x)

    return jax.tree.map(scale, weight, is_leaf=is_scaled)


def to_float32(x: jax.Array) -> jax.Array:
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


@checked
def attention(
    *, epsilon: NonNegative = 1.2, distance_norm: Literal["l2", "spectral"] = "l2"
) -> Aggregator:
    """FedAtt: softmax weights per tensor, larger for clients farther from the server.

    Ji et al. 2019, arXiv:1812.07108, algorithm 1: a = softmax_k(||w - w_k||) for every
    tensor, w+ = w - epsilon sum_k a_k (w - w_k). The softmax is streamed, one model of
    memory. Deviations: no noise is added (`gaussian_noise` does); running statistics
    are averaged by the algorithm's weights and without epsilon, which could make a
    variance negative.

    Args:
      epsilon: step of the server, >= 0.
      distance_norm: l2, or spectral on matrices, as in the authors' code.
    """

    def attend(change):
        is_matrix = distance_norm == "spectral" and change.ndim == 2
        length = jnp.linalg.norm(change, ord=2) if is_matrix else trees.norm(change)
        return LogScaled(length, (change, jnp.ones_like(length)))

    def summarize(key, state, update, weight):
        del key, state
        change, statistics, join = split(update)
        attended = [attend(x) for x in change]
        return Summary(join(attended, weighted(statistics, weight)), weight), {}

    def finish(key, state, total):
        del key
        change, statistics, join = split(total.update)
        moved = [epsilon * trees.divide(*scaled.tree) for scaled in change]
        mean = trees.divide(statistics, total.weight)
        return join(moved, mean), state, {}

    return Aggregator(summarize=summarize, finish=finish, role=LAST)


def softmax_mean() -> Aggregator:
    """Softmax-weighted mean sum_k a_k x_k, for weights from `counted_by`."""

    def summarize(key, state, update, weight):
        del key, state
        summed = [LogScaled(x.log, weighted(update, x.tree[0])) for x in weight]
        return Summary(summed, weight), {}

    def finish(key, state, total):
        del key
        parts = []
        for update, weight in zip(total.update, total.weight, strict=True):
            counts, ones = weight.tree
            parts.append(trees.divide((update.tree, counts), ones))
        change, counts = jax.tree.map(lambda *x: sum(x), *parts)
        return trees.divide(change, counts), state, {}

    return Aggregator(summarize=summarize, finish=finish, role=LAST)


def counted_by(count: jax.Array, logs: Sequence) -> list[LogScaled]:
    """Build a client's weight for `softmax_mean` from its logs.

    Args:
      count: [] by which its attention is multiplied.
      logs: [] each, one per attention, which is the softmax of it over clients.
    """
    return [LogScaled(x, (count, jnp.ones_like(count))) for x in logs]


def cohort_attention(weights: Sequence[LogScaled]) -> jax.Array:
    """Attention weights a [K], with sum 1, from the clients' weights of [K] each."""
    attention = jnp.stack([jax.nn.softmax(x.log) for x in weights]).sum(0)
    attention = attention * weights[0].tree[0].astype(attention.dtype)
    return trees.divide(attention, attention.sum())
