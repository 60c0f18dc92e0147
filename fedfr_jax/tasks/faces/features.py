"""Features of frozen networks, each computed once per round and image, not per step.

Where the views of an example are counted, as with mirroring alone, a frozen network
sees each example in few ways: the features of all are kept, on the server's side by row
of the data set, on the client's side by position in its list of examples. Under an
augmentation whose outcomes are not counted they are computed in the step.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.federated.outputs import embed_views
from fedfr_jax.types import Batch, Client, PyTree


class Features(NamedTuple):
    """Frozen features of a round, of some spans of the data set: see `spans_of`."""

    values: jax.Array  # [R, F, D] in F views
    first: jax.Array  # [S] int32 ascending: the row where a span begins
    shift: jax.Array  # [S] int32: from a span's rows to those of `values`

    def __call__(self, example: jax.Array, view: jax.Array) -> jax.Array:
        """Features [B, D] of rows [B], all within spans, in views [B] int32."""
        # Unrolled: a loop launches a kernel per turn.
        after = jnp.searchsorted(
            self.first, example, side="right", method="scan_unrolled"
        )
        return self.values[example + self.shift[after - 1], view]


def spans_of(first: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`Features.first` and `.shift` of spans that begin at table rows `first` [S].

    Args:
      place: [S] where each begins within the features' rows.
    """
    order = np.argsort(first)
    shift = place - first
    return first[order].astype(np.int32), shift[order].astype(np.int32)


class KnownFeatures(NamedTuple):
    """What a loss compares with, looked up."""

    by_row: Features | None  # of the global network
    by_position: jax.Array  # [P, F, D] of the previous one, in the client's list

    def global_features(self, batch: Batch) -> jax.Array:
        """[B, D] of the round's global network."""
        return self.by_row(batch.example, batch.view)

    def previous_features(self, batch: Batch) -> jax.Array:
        """[B, D] of the client's previous network."""
        return self.by_position[batch.position, batch.view]


class FrozenNetworks(NamedTuple):
    """What a loss compares with, computed of the batch: `KnownFeatures`' methods."""

    embed: Callable  # (variables, images [B, H, W, C]) -> [B, D]
    shared: PyTree  # variables of the global network
    previous: PyTree  # of the client's previous one

    def global_features(self, batch: Batch) -> jax.Array:
        """[B, D] of the round's global network."""
        return self.embed(self.shared, batch.images)

    def previous_features(self, batch: Batch) -> jax.Array:
        """[B, D] of the client's previous network."""
        return self.embed(self.previous, batch.images)


def frozen_features(
    embed: Callable, shared: PyTree, previous: PyTree, client: Client
) -> KnownFeatures | FrozenNetworks:
    """What a client's loss compares with in a round.

    Args:
      embed: (variables, images [B, H, W, C]) -> [B, D].
      shared, previous: variables of the two networks; those of `shared` are looked up
        in `client.tables` where views are counted, see `prepare_features`.
    """
    if not client.num_views:
        return FrozenNetworks(embed, shared, previous)
    return KnownFeatures(client.tables, position_features(embed, previous, client))


def own_class_means(
    embed: Callable, variables: PyTree, client: Client, num_classes: int
) -> jax.Array:
    """Mean feature of each of the client's own classes, plain views, [M, D].

    The features are averaged as they come; a class without an example is zero.
    """
    first = client.span(jnp.int32(0), jnp.int32(0))
    shape = jax.eval_shape(embed, variables, first.images)
    sums = jnp.zeros((num_classes, shape.shape[1]), shape.dtype)

    def body(carry):
        start, sums, counts = carry
        batch = client.span(start, jnp.int32(0))
        is_own = batch.is_valid & ~batch.is_extra
        place = jnp.where(is_own, batch.labels, num_classes)  # the others drop out
        one = jnp.ones(len(place), sums.dtype)
        features = embed(variables, batch.images)
        sums += jax.ops.segment_sum(features, place, num_classes)
        counts += jax.ops.segment_sum(one, place, num_classes)
        return start + len(place), sums, counts

    ongoing = lambda carry: carry[0] < client.num_local
    start = (jnp.int32(0), sums, jnp.zeros(num_classes, sums.dtype))
    _, sums, counts = jax.lax.while_loop(ongoing, body, start)
    return sums / jnp.maximum(counts, 1)[:, None]


def position_features(embed: Callable, variables: PyTree, client: Client) -> jax.Array:
    """Features of the client's examples by position and view, [P, F, D]."""

    @partial(jax.jit, inline=True)  # traced once, for shapes and for the loop
    def views_from(start):
        view = lambda i: client.span(start, i).images
        return embed_views(embed, variables, view, client.num_views)

    block = jax.eval_shape(views_from, jnp.int32(0))
    values = jnp.zeros((client.num_positions, *block.shape[1:]), block.dtype)

    def body(carry):
        start, values = carry
        put = partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
        return start + block.shape[0], put(values, views_from(start), start)

    count = client.num_local + client.num_extra
    ongoing = lambda carry: carry[0] < count
    return jax.lax.while_loop(ongoing, body, (jnp.int32(0), values))[1]


def class_mean_start(embed: Callable) -> Callable:
    """`begin` of `fedfr`: a head of zeros becomes the own classes' mean features.

    The branch's weights start as a copy. Over several lanes side by side the means are
    computed in every round, and selected away in all but a client's first.
    """

    def begin(backbone: PyTree, params: PyTree, client: Client) -> PyTree:
        own = {name: params[name] for name in ("head", "branch") if name in params}

        def fresh():
            head = own["head"]
            means = own_class_means(embed, backbone, client, len(head))
            new = {**own, "head": means.astype(head.dtype)}
            if "branch" in own:
                new["branch"] = {**own["branch"], "weights": new["head"]}
            return new

        known = jax.lax.cond(jnp.any(own["head"] != 0), lambda: own, fresh)
        return {**params, **known}

    return begin
