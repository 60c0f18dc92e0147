"""What algorithms with several server models share: IFCA and FeSEM.

Each client remembers one of J models and trains it; a model becomes the equal mean of
its clients' models, in one streamed sum over [J, ...], or stays.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.federated import collections
from fedfr_jax.federated.algorithms.aggregators import plain_sum
from fedfr_jax.types import Algorithm, ClientOutput, PyTree


def num_groups(models: PyTree) -> int:
    """J of `models` [J, ...]."""
    return len(jax.tree.leaves(collections.shared(models))[0])


def of_group(models: PyTree, group: jax.Array) -> PyTree:
    """Model `group` [] of `models` [J, ...], with the client's own leaves if any."""
    one = jax.tree.map(lambda x: x[group], collections.shared(models))
    return {**models, **one}


def several(variables: PyTree, groups: int, spread: float) -> PyTree:
    """`groups` copies [J, ...] of variables, the params of each a little different.

    Normal noise of `spread` times the standard deviation of each leaf is added.
    """
    random = np.random.default_rng(0)

    def stack(x):
        noise = random.standard_normal((groups, *x.shape)).astype(x.dtype)
        return x[None] + spread * jnp.std(x) * noise

    copy = lambda x: jnp.broadcast_to(x[None], (groups, *x.shape))
    return {
        "params": jax.tree.map(stack, variables["params"]),
        "batch_stats": jax.tree.map(copy, variables["batch_stats"]),
    }


def clustered(client_update: Callable, groups: int, spread: float) -> Algorithm:
    """J models, of which each client remembers one; the judged one is their mean.

    Raises:
      ValueError: when `groups` or `spread` is out of range.
    """
    if groups < 1:
        raise ValueError(f"groups must be at least 1, got {groups}.")
    if spread < 0:
        raise ValueError(f"spread must be at least 0, got {spread}.")
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

    def network(models):
        mean = jax.tree.map(lambda x: x.mean(0), collections.shared(models))
        return {**models, **mean}

    return Algorithm(
        init=lambda variables: several(variables, groups, spread),
        init_personal=draw,
        client_update=client_update,
        aggregator=plain_sum(),
        server_update=server_update,
        personalize=of_group,
        network=network,
    )


def report(models: PyTree, group: jax.Array, end: PyTree, metrics) -> ClientOutput:
    """A client's change in its group's place of [J, ...], zero in the others."""
    place = lambda x, y: jnp.zeros_like(x).at[group].set(y - x[group])
    sent = collections.shared(models), collections.shared(end)
    members = jnp.zeros(num_groups(models), jnp.float32).at[group].set(1)
    update = (jax.tree.map(place, *sent), members)
    metrics = {**metrics, "group": group.astype(jnp.float32)}
    own = collections.own(end)
    return ClientOutput(update, jnp.float32(1), group, metrics, local=own)
