"""What algorithms with several server models share: IFCA, HypCluster and FeSEM.

Each client remembers one of J models and trains it; a model becomes the mean of its
clients' models, in one streamed sum over [J, ...], or stays.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax import trees
from fedfr_jax.federated import collections
from fedfr_jax.federated.aggregation.mean import cluster_mean
from fedfr_jax.schema import check_ranges
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
    check_ranges("", locals(), {"groups": (1, jnp.inf), "spread": (0, jnp.inf)})
    draw = lambda key, models: jax.random.randint(
        key, (), 0, num_groups(models), jnp.int32
    )

    def network(models):
        mean = jax.tree.map(lambda x: x.mean(0), collections.shared(models))
        return {**models, **mean}

    return Algorithm(
        init=lambda variables: several(variables, groups, spread),
        init_personal=draw,
        client_update=client_update,
        aggregator=cluster_mean(),
        server_update=lambda models, result: trees.added(models, result.aggregate),
        personalize=of_group,
        network=network,
        has_global_model=False,
        update_like=only_one,
    )


def only_one(models: PyTree) -> PyTree:
    """Raise ValueError for links with a state, which is of one server model."""
    raise ValueError(
        "aggregation must have no link that keeps a center, such as centered_clip or "
        f"rfa, with several server models, got {num_groups(models)} of them."
    )


def report(
    models: PyTree, group: jax.Array, end: PyTree, metrics: PyTree, weight: jax.Array
) -> ClientOutput:
    """What a client of `group` [] sends: its distance from the group's model."""
    metrics = {**metrics, "group": group.astype(jnp.float32)}
    own = collections.own(end)
    change = collections.change(end, of_group(models, group))
    weights = jnp.zeros(num_groups(models), weight.dtype).at[group].set(weight)
    return ClientOutput(change, weights, group, metrics, local=own)
