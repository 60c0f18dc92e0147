"""Features of frozen networks, each computed once per round and image, not per step.

With mirroring as the only augmentation a frozen network sees each example in two ways
at most; the features of both are kept, on the server's side by table row, on the
client's side by position in its list of examples.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.federated.outputs import embed_views
from fedfr_jax.types import Client, PyTree


class Features(NamedTuple):
    """Frozen features of a round, of some spans of the table: see `spans_of`."""

    values: jax.Array  # [R, F, D], F = 2 with flips, 1 without
    first: jax.Array  # [S] int32 ascending: the table's row where a span begins
    shift: jax.Array  # [S] int32: from a span's rows of the table to those of `values`

    def __call__(self, example: jax.Array, is_flipped: jax.Array) -> jax.Array:
        """Features [B, D] of table rows [B], all within spans, under flips [B]."""
        flip = is_flipped.astype(jnp.int32) if self.values.shape[1] > 1 else 0
        # Unrolled: a loop launches a kernel per turn.
        after = jnp.searchsorted(
            self.first, example, side="right", method="scan_unrolled"
        )
        return self.values[example + self.shift[after - 1], flip]


def spans_of(first: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`Features.first` and `.shift` of spans that begin at table rows `first` [S].

    Args:
      place: [S] where each begins within the features' rows.
    """
    order = np.argsort(first)
    shift = place - first
    return first[order].astype(np.int32), shift[order].astype(np.int32)


class Frozen(NamedTuple):
    """Features that the contrastive term compares with, fixed during a round."""

    global_features: Features
    previous: jax.Array  # [P, F, D] by position in the client's list and flip

    def previous_features(self, position, is_flipped):
        """Features [B, D] of positions [B] under flips [B]."""
        flip = is_flipped.astype(jnp.int32) if self.previous.shape[1] > 1 else 0
        return self.previous[position, flip]


def own_class_means(
    embed: Callable, variables: PyTree, client: Client, num_classes: int
) -> jax.Array:
    """Mean feature of each of the client's own classes, unflipped, [M, D].

    The features are averaged as they come; a class without an example is zero.
    """
    first = client.span(jnp.int32(0), jnp.bool_(False))
    shape = jax.eval_shape(embed, variables, first.images)
    sums = jnp.zeros((num_classes, shape.shape[1]), shape.dtype)

    def body(carry):
        start, sums, counts = carry
        batch = client.span(start, jnp.bool_(False))
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
    """Features of all the client's examples by position and flip, [P, F, D]."""

    @partial(jax.jit, inline=True)  # traced once, for shapes and for the loop
    def views_from(start):
        view = lambda is_flipped: client.span(start, is_flipped).images
        return embed_views(embed, variables, view, client.num_flips)

    block = jax.eval_shape(views_from, jnp.int32(0))
    values = jnp.zeros((client.num_positions, *block.shape[1:]), block.dtype)

    def body(carry):
        start, values = carry
        put = partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
        return start + block.shape[0], put(values, views_from(start), start)

    count = client.num_local + client.num_extra
    ongoing = lambda carry: carry[0] < count
    return jax.lax.while_loop(ongoing, body, (jnp.int32(0), values))[1]
