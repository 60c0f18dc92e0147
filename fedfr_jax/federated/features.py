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
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.compiling import compiler_options
from fedfr_jax.federated.stream import Stream, blocks
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


def build_embed(embed: Callable, feed, mesh: Mesh) -> Callable:
    """Features of table rows, block by block, rows cut over the client devices.

    Returns:
      run(variables, table, rows [R] int32) -> [R', F, D] with R' >= R: the tail is
      padding that keeps blocks whole. `table` is a `Table` or a `Stream`.
    """
    num_devices = mesh.shape[meshes.CLIENTS]
    cut = P(meshes.CLIENTS)

    def block(variables, images):
        view = lambda flip: feed.decode(images, jnp.full(len(images), flip))
        return embed_views(embed, variables, view, 2 if feed.flip else 1)

    def gathered(variables, table, rows):
        one = lambda rows: block(variables, table.images[rows])
        values = jax.lax.map(one, rows.reshape(-1, feed.batch_size))
        return values.reshape(-1, *values.shape[2:])

    def streamed(variables, images):
        parts = images.reshape(-1, feed.batch_size, *images.shape[1:])
        values = jax.lax.map(lambda images: block(variables, images), parts)
        return values.reshape(-1, *values.shape[2:])

    def over_devices(function, *specs):
        sharded = meshes.over_client_devices(mesh, function, specs, cut)
        options = compiler_options(mesh, None)
        return unless_traced(
            jax.jit(sharded, compiler_options=options), jax.jit(sharded)
        )

    gathered = over_devices(gathered, P(), P(), cut)
    streamed = over_devices(streamed, P(), cut)

    def run(variables, table, rows):
        if isinstance(table, Stream):
            values = []
            for block in blocks(table, rows, mesh, feed.batch_size):
                features = streamed(variables, block.images)
                values.append(jax.block_until_ready(features))
            return jnp.concatenate(values)
        rows = np.pad(rows, (0, -len(rows) % (num_devices * feed.batch_size)))
        return gathered(variables, table, meshes.put(rows, meshes.over_clients(mesh)))

    return run


def unless_traced(compiled: Callable, plain: Callable) -> Callable:
    """`compiled`, but `plain` within another trace, where JAX takes no options."""

    def call(*arguments):
        leaves = jax.tree.leaves(arguments)
        is_traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
        return (plain if is_traced else compiled)(*arguments)

    return call


def embed_views(
    embed: Callable, variables: PyTree, view: Callable, num_flips: int
) -> jax.Array:
    """Features [B, F, D] of `view: flipped [] bool -> images [B, H, W, C]`.

    A loop over the views has the network once, and batches as large as a step's, which
    have kernels in common with it: less to compile than one batch of all views.
    """
    one = lambda is_flipped: embed(variables, view(is_flipped))
    return jnp.moveaxis(jax.lax.map(one, jnp.arange(num_flips) > 0), 0, 1)


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
