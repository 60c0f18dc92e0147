"""Reductions over clients, streamed: finish(sum over clients of summarize(...))."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.types import Aggregator, Algorithm, Client, PyTree


def weighted_mean() -> Aggregator:
    """sum_k w_k x_k / sum_k w_k in at least float32 (McMahan et al. 2017, alg. 1).

    The weights of a cohort must not all be zero: then the mean is NaN, which the loop
    reports instead of training on.
    """

    def summarize(update, weight):
        weighted = jax.tree.map(
            lambda x: wide(x) * weight.astype(wide(x).dtype), update
        )
        return weighted, weight

    def finish(total):
        weighted, weight = total
        return trees.divided(weighted, weight)

    return Aggregator(summarize, finish)


def plain_sum() -> Aggregator:
    """sum_k x_k in at least float32: a client puts its weights into x itself."""

    def summarize(update, weight):
        del weight
        return jax.tree.map(wide, update)

    return Aggregator(summarize, finish=lambda total: total)


def dropping(algorithm: Algorithm) -> Algorithm:
    """`algorithm` without the clients whose update has nan or infinity.

    Such an update becomes zero and counts with weight 0, and metrics that are not
    finite become 0. The metric `dropped` is 1 for the client, 0 for the others.
    """

    def client_update(key, server, personal, client):
        output = algorithm.client_update(key, server, personal, client)
        is_finite = trees.is_finite(output.update)
        update = trees.where(is_finite, output.update, _zeros(output.update))
        metrics = jax.tree.map(
            lambda x: jnp.where(is_finite | jnp.isfinite(x), x, 0), output.metrics
        )
        return output._replace(
            update=update,
            weight=jnp.where(is_finite, output.weight, 0),
            metrics={**metrics, "dropped": jnp.where(is_finite, 0.0, 1.0)},
        )

    return algorithm._replace(client_update=client_update)


def from_all(algorithm: Algorithm, combine: Callable) -> Algorithm:
    """`algorithm`, like FedAvg, with `combine` in place of the mean of the updates.

    Args:
      combine: (updates of the whole cohort, a tree of [K, ...], their weights [K]) ->
        tree of [...]; they are kept, which takes the memory of K models.
    """

    def client_update(key, server, personal, client):
        output = algorithm.client_update(key, server, personal, client)
        return output._replace(update=(), upload=output.update)

    def server_update(server, result):
        aggregate = combine(result.upload, result.weights)
        return algorithm.server_update(server, result._replace(aggregate=aggregate))

    return algorithm._replace(
        client_update=client_update,
        aggregator=plain_sum(),
        server_update=server_update,
    )


def equally(client: Client) -> jax.Array:
    """Aggregation weight 1: the mean is over clients, not over examples."""
    del client
    return jnp.float32(1)


def by_examples(client: Client) -> jax.Array:
    """Aggregation weight n_k: the client's own examples."""
    return client.num_local.astype(jnp.float32)


WEIGHTS = {"examples": by_examples, "equally": equally}


def weight_of(weigh: str | Callable) -> Callable:
    """A name of WEIGHTS, or a function, as client -> weight [].

    Raises:
      ValueError: for an unknown name.
    """
    if not callable(weigh) and weigh not in WEIGHTS:
        raise ValueError(f"weigh must be one of {list(WEIGHTS)}, got {weigh!r}.")
    return weigh if callable(weigh) else WEIGHTS[weigh]


def wide(x: jax.Array) -> jax.Array:
    """`x` in float32, or as it is when already wider."""
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def _zeros(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.zeros_like, tree)
