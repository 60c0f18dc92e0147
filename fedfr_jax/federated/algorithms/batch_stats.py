"""Batch statistics: averaged, kept by clients, or those of a random client.

Algorithms average them like parameters, but plainly. FedBN (Li et al. 2021,
arXiv:2102.07623) keeps a client's own; the released FedReID takes those of the client
that its random sample of the cohort names first, another one in every round.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from fedfr_jax import trees
from fedfr_jax.federated import variable_split
from fedfr_jax.federated.algorithms.personal import with_personal_layers
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, PyTree


@checked
def with_batch_stats(
    algorithm: Algorithm, mode: Literal["average", "local", "random_client"]
) -> Algorithm:
    """Average an algorithm's batch statistics, keep them, or take a random client's.

    Args:
      mode: average (as algorithms do), local (each client keeps its own) or
        random_client (the server takes those of one client of the cohort, as FedReID's
        released code).
    """
    if mode == "average":
        return algorithm
    personal = with_personal_layers(algorithm, batch_stats_mask)
    if mode == "local":
        return personal
    return from_random_client(personal)._replace(
        has_global_model=algorithm.has_global_model
    )


def batch_stats_mask(variables: PyTree) -> PyTree:
    """Mask of the batch statistics among variables."""
    mask = lambda name: jax.tree.map(lambda _: name == "batch_stats", variables[name])
    return {name: mask(name) for name in variables}


def check_batch_stats(variables: PyTree) -> None:
    """Raise ValueError for a model without batch statistics."""
    if not jax.tree.leaves(variables["batch_stats"]):
        raise ValueError("the model must have batch norms, got none.")


def batch_norms(variables: PyTree) -> PyTree:
    """Mask of FedBN's personal leaves: scale, bias, mean and variance of batch norms.

    A batch norm is a module with running statistics, whatever its name.
    """
    check_batch_stats(variables)
    stats = jax.tree_util.tree_leaves_with_path(variables["batch_stats"])
    places = {path[:-1] for path, _ in stats}
    is_norm = lambda path, _: path[:-1] in places
    norms = jax.tree_util.tree_map_with_path(is_norm, variables["params"])
    return {**batch_stats_mask(variables), "params": norms}


def from_random_client(algorithm: Algorithm) -> Algorithm:
    """Give all clients the personal leaves of the one with `is_random_client`."""

    def client_update(key, server, row, client):
        row = row._replace(leaves=server.first)
        output = algorithm.client_update(key, server, row, client)
        leaves = output.personal.leaves
        zeros = jax.tree.map(jnp.zeros_like, leaves)
        sent = trees.where(client.is_random_client, leaves, zeros)
        return output._replace(sums=(output.sums, sent))

    def server_update(server, result):
        inner, first = result.sums
        result = result._replace(sums=inner, personal_variables=first)
        server = algorithm.server_update(server, result)
        renewed = variable_split.personal_in_models(server.inner)
        sent = variable_split.in_models(server.inner, variable_split.shared)
        return server._replace(inner=sent, first=renewed or first)

    def report(server, result):
        return algorithm.cohort_metrics(server, result._replace(sums=result.sums[0]))

    def personalize(server, row):
        return algorithm.personalize(server, row._replace(leaves=server.first))

    return algorithm._replace(
        client_update=client_update,
        server_update=server_update,
        personalize=personalize,
        cohort_metrics=report if algorithm.cohort_metrics else None,
    )
