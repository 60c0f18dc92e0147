"""Aggregations of given updates: alone, and in whole rounds."""

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.federated import sums
from fedfr_jax.federated.aggregation.contract import with_aggregation
from fedfr_jax.federated.algorithms.fedavg import fedavg
from tests.federated.toys import flat, replay, unflat


def aggregate(aggregator, updates, weights=None, *, state=None, key=0):
    """(aggregate, state) of updates [K, ...], as the engine makes it."""
    count = len(jax.tree.leaves(updates)[0])

    @jax.jit
    def run(updates, weights, state, key):
        key = jax.random.key(key)
        if state is None:
            zeros = jax.tree.map(lambda x: jnp.zeros_like(x[0]), updates)
            state = aggregator.init(zeros)

        def one(i, update, weight):
            keys = jax.random.fold_in(key, i)
            found, _ = aggregator.summarize(keys, state, update, weight)
            return sums.without_kept(found)

        summary, kept = jax.vmap(one)(jnp.arange(count), updates, weights)
        total = sums.with_kept(sums.over_lanes(summary), kept)
        return aggregator.finish(key, state, total)[:2]

    weights = jnp.ones(count) if weights is None else jnp.asarray(weights)
    return run(jax.tree.map(jnp.asarray, updates), weights, state, key)


def play_updates(
    updates, *links, weighting="uniform", rounds=1, where=(2, 2), around=None
):
    """Rounds of clients that move by `updates` [K, 18] from wherever they are.

    The k-th of them has k + 1 examples. `around` changes the algorithm.
    """
    number, given = len(updates), jnp.asarray(updates)

    def train(key, variables, client):
        del key
        end = jax.tree.map(jnp.add, variables["params"], unflat_row(given[client.id]))
        zero = jnp.zeros(())
        return {**variables, "params": end}, {"loss": zero, "steps": zero + 1}

    sizes = range(1, number + 1)
    examples = [[np.zeros((n, 5)) for n in sizes], [np.zeros(n, int) for n in sizes]]
    algorithm = with_aggregation(fedavg(train, weighting=weighting), *links)
    algorithm = around(algorithm) if around else algorithm
    start = unflat(np.zeros(18))
    return replay(algorithm, examples, start, where=where, rounds=rounds)


def unflat_row(w):
    return {"W": w[:15].reshape(5, 3), "b": w[15:]}


def network_of(server):
    """Flat parameters of a server with or without the state of links."""
    return flat(getattr(server, "inner", server).variables)


def center_of(server):
    """The flat center, which is all that links keep."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(server.links)])
