"""Embeddings of many images with one network, spread over the client devices."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes


def build_embed(embed: Callable, feed, mesh: Mesh) -> Callable:
    """Features of table rows, block by block, rows cut over the client devices.

    Returns:
      run(variables, table, rows [R] int32) -> [R', F, D] with R' >= R: the tail is
      padding that keeps blocks whole.
    """
    num_devices = mesh.shape[meshes.CLIENTS]

    def block(variables, table, rows):
        images = table.images[rows]
        views = [jnp.zeros(len(rows), bool), jnp.ones(len(rows), bool)][
            : 2 if feed.flip else 1
        ]
        decoded = [feed.decode(images, flipped) for flipped in views]
        return jnp.stack([embed(variables, x) for x in decoded], axis=1)

    def device(variables, table, rows):
        blocks = rows.reshape(-1, feed.batch_size)
        values = jax.lax.map(lambda r: block(variables, table, r), blocks)
        return values.reshape(-1, *values.shape[2:])

    sharded = jax.jit(
        jax.shard_map(
            device,
            mesh=mesh,
            in_specs=(P(), P(), P(meshes.CLIENTS)),
            out_specs=P(meshes.CLIENTS),
            axis_names={meshes.CLIENTS},
            check_vma=False,
        )
    )

    def run(variables, table, rows):
        rows = np.pad(rows, (0, -len(rows) % (num_devices * feed.batch_size)))
        return sharded(
            variables, table, jax.device_put(rows, meshes.over_clients(mesh))
        )

    return run
