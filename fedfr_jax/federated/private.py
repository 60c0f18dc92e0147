"""Leaves that stay with a client under any algorithm, such as its class embeddings.

FedPer's split (Arivazhagan et al. 2019, arXiv:1912.00818) for methods that know nothing
of it. The private leaves travel as a part of `batch_stats`, which every algorithm hands
through its local steps and averages plainly: before a client trains they are put in
place, afterwards they are taken out of its update, so that the server holds zeros. The
loss moves them itself (`descend`), at the rate that each batch carries; corrections,
penalties and normalisations of a method act on the shared parameters alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedfr_jax import trees
from fedfr_jax.types import Algorithm, Batch, Client, PyTree

PRIVATE = "private"


class Row(NamedTuple):
    """What stays with a client."""

    inner: PyTree  # the algorithm's own row
    leaves: PyTree  # the private leaves


class PrivateBatch(NamedTuple):
    """A `Batch`, and what a loss needs to move the private leaves."""

    images: jax.Array  # [B, H, W, C]
    labels: jax.Array  # [B] int32
    is_valid: jax.Array  # [B] bool
    is_extra: jax.Array  # [B] bool
    example: jax.Array  # [B] int32
    position: jax.Array  # [B] int32
    is_flipped: jax.Array  # [B] bool
    num_classes: jax.Array  # [] int32 the client's own classes
    rate: jax.Array  # [] learning rate of this step, 0 where nothing is trained


def hide(variables: PyTree, leaves: PyTree, optimizer) -> PyTree:
    """`variables` with a place for private `leaves` (arrays or shapes), all zeros."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), leaves)
    place = {"leaves": zeros, "opt_state": optimizer.init(zeros)}
    return {
        "params": variables["params"],
        "batch_stats": {"shared": variables["batch_stats"], PRIVATE: place},
    }


def reveal(variables: PyTree) -> PyTree:
    """Inverse of `hide`: the variables without the private place."""
    return {**variables, "batch_stats": variables["batch_stats"]["shared"]}


def descend(place: PyTree, gradient: PyTree, optimizer, rate: jax.Array) -> PyTree:
    """The private place after one step down the `gradient` of its leaves."""
    leaves = place["leaves"]
    step, opt_state = optimizer.update(gradient, place["opt_state"], leaves)
    leaves = jax.tree.map(lambda x, d: x - rate.astype(x.dtype) * d, leaves, step)
    return {"leaves": leaves, "opt_state": opt_state}


def private_leaves(
    algorithm: Algorithm,
    init_leaves: Callable,
    optimizer: optax.GradientTransformation,
    learning_rate: Callable,
) -> Algorithm:
    """`algorithm` whose clients keep private leaves; personalize gives `reveal`ed ones.

    Args:
      algorithm: with a loss that takes `PrivateBatch`es; its server starts from
        `hide(...)`, or several of them stacked.
      init_leaves: key -> a new client's leaves.
      optimizer, learning_rate: of the leaves, as for `local_sgd`; the optimizer's
        first state must be zeros.
    """

    def init_personal(key, server):
        leaves_key, inner_key = jax.random.split(key)
        leaves = init_leaves(leaves_key)
        inner = algorithm.init_personal(inner_key, _put(server, leaves))
        return Row(inner, leaves)

    def client_update(key, server, row, client):
        output = algorithm.client_update(
            key,
            _put(server, row.leaves),
            _without_momentum(row.inner),
            _with_rates(client, learning_rate),
        )
        sent = (output.update, output.upload)
        leaves = _add_change(row.leaves, sent)
        update, upload = _blank(sent)
        own = Row(output.personal, leaves)
        return output._replace(update=update, upload=upload, personal=own)

    def personalize(server, row):
        return reveal(algorithm.personalize(server, row.inner))

    return algorithm._replace(
        init_personal=init_personal,
        client_update=client_update,
        personalize=personalize,
    )


def _with_rates(client: Client, learning_rate: Callable) -> Client:
    """The client whose batches carry its number of classes and the step's rate."""

    def dress(batch: Batch, rate) -> PrivateBatch:
        return PrivateBatch(*batch, client.num_classes, rate)

    def batch(step):
        rate = learning_rate(client.round, client.epoch(step))
        return dress(client.batch(step), jnp.asarray(rate))

    still = lambda start, is_flipped: dress(
        client.span(start, is_flipped), jnp.zeros(())
    )
    return client._replace(batch=batch, span=still)


def _private(path) -> str:
    """Name inside the private place, "" outside of it."""
    return trees.path_name(path).partition(f"{PRIVATE}/")[2]


def _put(tree: PyTree, leaves: PyTree) -> PyTree:
    """Every private place of `tree` holds `leaves`, and a fresh optimizer state."""
    named = jax.tree_util.tree_leaves_with_path({"leaves": leaves})
    values = {trees.path_name(path): x for path, x in named}
    return jax.tree_util.tree_map_with_path(
        lambda path, x: (
            jnp.broadcast_to(values[_private(path)], x.shape)
            if _private(path) in values
            else x
        ),
        tree,
    )


def _without_momentum(tree: PyTree) -> PyTree:
    """A row's own private places keep their leaves and start a round afresh."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: (
            jnp.zeros_like(x) if _private(path).startswith("opt_state") else x
        ),
        tree,
    )


def _blank(tree: PyTree) -> PyTree:
    """Zeros in every private place."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.zeros_like(x) if _private(path) else x, tree
    )


def _add_change(leaves: PyTree, sent: PyTree) -> PyTree:
    """`leaves` plus their change in `sent`; over several models, the one that moved.

    They stay as they are where the algorithm keeps them in its own row.
    """
    named = jax.tree_util.tree_leaves_with_path(sent)
    changes = {_private(path): x for path, x in named if _private(path)}

    def add(path, x):
        change = changes.get(trees.path_name(path))
        if change is None:
            return x
        change = change.sum(0) if change.ndim > x.ndim else change
        return x + change.astype(x.dtype)

    return jax.tree_util.tree_map_with_path(add, {"leaves": leaves})["leaves"]
