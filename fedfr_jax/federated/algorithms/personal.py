"""Personal layers under any algorithm: trained and stored by clients, never sent.

FedPer (Arivazhagan et al. 2019, arXiv:1912.00818) keeps the top K_P blocks, FedBN (Li
et al. 2021, arXiv:2102.07623) the batch norms, local training everything. The leaves
are passed to the algorithm as the collection "local" of every network in its server,
which is not sent. A stack of blocks that is personal in part is cut.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedfr_jax import scanned_blocks, trees
from fedfr_jax.federated import variable_split
from fedfr_jax.federated.aggregation.contract import on_inner
from fedfr_jax.ranges import Whole
from fedfr_jax.schema import checked
from fedfr_jax.types import Algorithm, PyTree


class ServerWithLayers(NamedTuple):
    """The algorithm's server state, whose models lack the personal leaves."""

    inner: PyTree
    first: PyTree  # the leaves that a new client starts from, when none are drawn


class PersonalWithLayers(NamedTuple):
    """The algorithm's personal state, and the personal leaves."""

    inner: PyTree
    leaves: PyTree  # {"params", "batch_stats"}, None for what is shared


def with_personal_layers(
    algorithm: Algorithm,
    select: str | Callable | None,
    *,
    init_per_client: Callable | None = None,
) -> Algorithm:
    """Let an algorithm's clients keep the leaves that `select` matches.

    Args:
      select: regular expression over leaf paths such as `params/head` or that of
        `top_blocks(model.blocks, 2)`, or variables -> tree of bool with a key for
        every block; None or "" selects nothing.
      init_per_client: key -> variables, or those of the leaves that are personal: what
        a new client starts from; None starts all clients from the variables of `init`.

    Raises:
      ValueError: once `init` has seen the leaves, when none matches, or when they are
        not of one network, as FedFR's.
    """
    if not select:
        return algorithm
    is_kept = trees.matching(select) if isinstance(select, str) else select
    whole = variable_split.whole_variables

    def init(variables):
        if not variable_split.is_variables(variables):
            got = f"one of {sorted(variables)} that keeps leaves itself"
            raise ValueError(
                f"personal needs an algorithm with one server model, got {got}."
            )
        variables, mask = scanned_blocks.split_stacks(variables, is_kept)
        leaves, rest = trees.split(mask, variables)
        return ServerWithLayers(algorithm.init(rest), leaves)

    def init_personal(key, server):
        draw_key, key = jax.random.split(key)
        leaves = server.first
        if init_per_client:
            leaves = like_leaves(init_per_client(draw_key), leaves)
        inner = algorithm.init_personal(key, fill_personal(server, leaves))
        return PersonalWithLayers(inner, leaves)

    def client_update(key, server, personal, client):
        inner = fill_personal(server, personal.leaves)
        output = algorithm.client_update(key, inner, personal.inner, client)
        if output.personal_variables == ():
            raise ValueError(
                "personal needs an algorithm whose ClientOutput has "
                "personal_variables=variable_split.personal_variables(end), got ()."
            )
        trained = output.personal_variables
        old = scanned_blocks.unstack_like(personal.leaves, trained)
        leaves = variable_split.select_like(old, trained)
        leaves = scanned_blocks.unstack_like(leaves, personal.leaves)
        return output._replace(
            personal=PersonalWithLayers(output.personal, leaves),
            personal_variables=variable_split.drop_like(old, trained),
        )

    def personalize(server, personal):
        inner = fill_personal(server, personal.leaves)
        return whole(algorithm.personalize(inner, personal.inner))

    # For clients' leaves, which the server lacks, those of a new client are used.
    def global_model(server):
        return whole(algorithm.global_model(fill_personal(server, server.first)))

    def prepare(server, context):
        assert algorithm.prepare
        return algorithm.prepare(fill_personal(server, server.first), context)

    return on_inner(algorithm)._replace(
        init=init,
        init_personal=init_personal,
        client_update=client_update,
        personalize=personalize,
        global_model=global_model,
        has_global_model=False,
        prepare=prepare if algorithm.prepare else None,
    )


def fill_personal(server: ServerWithLayers, leaves: PyTree) -> PyTree:
    """Insert a client's personal leaves into each model of the algorithm's server."""
    inner = server.inner
    if isinstance(inner, ServerWithLayers):  # another one, with leaves of its own
        return inner._replace(inner=fill_personal(inner, leaves))
    add = lambda variables: variable_split.with_personal(variables, leaves)
    return variable_split.in_models(inner, add)


def like_leaves(variables: PyTree, leaves: PyTree) -> PyTree:
    """Leaves of `variables` at the paths of `leaves`; others may be missing."""
    variables = scanned_blocks.unstack_like(variables, leaves)
    named = trees.by_name(variables)

    def pick(path, leaf):
        name = trees.path_name(path)
        if name not in named or named[name].shape != leaf.shape:
            got = named[name].shape if name in named else "none"
            raise ValueError(
                f"init_per_client must give {name} of shape {leaf.shape}, got {got}."
            )
        return named[name].astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(pick, leaves)


@checked
def top_blocks(names: tuple[str, ...], count: Whole, *, prefix: str = "") -> str:
    """Pattern of the top `count` blocks, params and batch statistics (FedPer's K_P).

    Args:
      names: `Model.blocks`, path prefixes below params in the order of the data.
      count: K_P in [0, number of blocks]; 0 selects nothing.
      prefix: where the blocks lie below params, such as "backbone/".
    """
    if count > len(names):
        raise ValueError(
            f"blocks must be in [0, {len(names)}] ({', '.join(names)}), got {count}."
        )
    top = names[len(names) - count :]
    return f"^(params/{prefix}|batch_stats/)({'|'.join(top)})/" if top else ""


@checked
def with_batch_stats(
    algorithm: Algorithm, mode: Literal["average", "local", "random_client"]
) -> Algorithm:
    """Average an algorithm's batch statistics, keep them, or take a random client's.

    Args:
      mode: average (as algorithms do), local (each client keeps its own, arXiv:
        2102.07623) or random_client (the server takes those of one client of the
        cohort, another one in every round, as FedReID's released code).
    """
    if mode == "average":
        return algorithm
    personal = with_personal_layers(algorithm, batch_stats_mask)
    return personal if mode == "local" else from_random_client(personal, algorithm)


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


def from_random_client(personal: Algorithm, algorithm: Algorithm) -> Algorithm:
    """Give all clients of `personal` the leaves of the one with `is_random_client`."""

    def client_update(key, server, state, client):
        state = state._replace(leaves=server.first)
        output = personal.client_update(key, server, state, client)
        leaves = output.personal.leaves
        zeros = jax.tree.map(jnp.zeros_like, leaves)
        sent = trees.where(client.is_random_client, leaves, zeros)
        return output._replace(sums=(output.sums, sent))

    def server_update(server, result):
        inner, first = result.sums
        result = result._replace(sums=inner, personal_variables=first)
        server = personal.server_update(server, result)
        renewed = variable_split.personal_in_models(server.inner)
        sent = variable_split.in_models(server.inner, variable_split.shared)
        return server._replace(inner=sent, first=renewed or first)

    def report(server, result):
        assert personal.cohort_metrics
        return personal.cohort_metrics(server, result._replace(sums=result.sums[0]))

    def personalize(server, state):
        return personal.personalize(server, state._replace(leaves=server.first))

    return personal._replace(
        client_update=client_update,
        server_update=server_update,
        personalize=personalize,
        cohort_metrics=report if personal.cohort_metrics else None,
        has_global_model=algorithm.has_global_model,
    )
