"""A network's outputs for rows of a data set, spread over the devices.

What is counted as different views of an example (its mirror image) is computed for
each, so that frozen networks see an example once and not at every step.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.compiling import compiler_options
from fedfr_jax.federated.stream import Stream, blocks
from fedfr_jax.types import PyTree


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
