"""Means of a value over the examples of one client or of a cohort.

A cohort's rows are concatenated and cut into batches, which are sharded over the
devices; of a streamed data set they are read chunk by chunk.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax import trees
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.client import (
    DeviceExamples,
    Population,
    client_view,
    cohort_rows,
    single_slot,
)
from fedfr_jax.federated.streaming import DATA_KINDS, SegmentData, place_data
from fedfr_jax.types import Client, Cohort, Prepared, PyTree


def over_examples(value_fn: Callable, client: Client) -> PyTree:
    """Mean of `value_fn: batch -> tree` over a client's examples, without augmentation.

    Batches count by their number of valid examples, which is exact where the value is
    itself a mean over a batch's valid examples.
    """
    count = client.num_examples + client.num_added
    read = lambda start: client.batch_from(start, jnp.int32(0))
    return mean_metrics(sum_over(value_fn, read, jnp.int32(0), count), count)


def sum_over(
    value_fn: Callable, read: Callable, first: jax.Array, last: jax.Array
) -> PyTree:
    """Sum of `value_fn: batch -> tree` over batches, weighted by valid examples.

    Args:
      read: position [] int32 -> the batch that begins there.
      first, last: [] int32, the positions are [first, last).
    """

    def body(carry):
        start, total = carry
        batch = read(start)
        number = batch.is_valid.sum()
        total = jax.tree.map(
            lambda t, x: t + x * number.astype(x.dtype), total, value_fn(batch)
        )
        return start + len(batch.is_valid), total

    shapes = jax.eval_shape(lambda: value_fn(read(first)))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.while_loop(lambda carry: carry[0] < last, body, (first, zeros))[1]


def mean_metrics(total: PyTree, count: jax.Array) -> PyTree:
    """Divide sums over `count` [] examples by it; 0 for none."""
    return trees.divide(total, jnp.maximum(count, 1))


def build_dataset_mean(value_fn: Callable, batching: Batching, mesh: Mesh) -> Callable:
    """Build the mean of a value over a cohort's examples, without augmentation.

    Args:
      value_fn: (variables, batch, key) -> tree, a mean over the batch's valid examples.

    Returns:
      run(variables, table, population, cohort) -> tree, the same on every device;
      `table` is a `Dataset` or a `Stream`.
    """
    batch_size = batching.batch_size

    def device(variables, block, union, start):
        """Sum on one device, over its share of the positions from `start` on."""
        rows, count, round = union
        size = len(block.rows)
        first = start + jax.lax.axis_index(meshes.CLIENTS) * size

        def read(position):
            examples = rows_of(block, position - first)
            client = union_view(batching, rows, count, examples, round)
            return client.batch_from(position, jnp.int32(0))

        def value(batch):
            return value_fn(variables, batch, jax.random.key(round))

        total = sum_over(value, read, first, jnp.minimum(first + size, count))
        return meshes.sum_over_clients(mesh, total)

    def over_devices(kind):
        specs = P(), SegmentData(kind.spec, P(meshes.CLIENTS)), P(), P()
        return jax.jit(meshes.over_client_devices(mesh, device, specs, P()))

    compiled = {kind: over_devices(kind) for kind in DATA_KINDS}

    def run(variables, table, population: Population, cohort: Cohort):
        table = place_data(mesh, table)
        rows, _, counts = cohort_rows(population, cohort.ids)
        count, start, total = int(counts.sum()), 0, None
        union = (rows.astype(np.int32), np.int32(count), np.int32(cohort.round))
        union = meshes.put_global(union, meshes.replicated(mesh))
        # As `client_view` pads a client's last batch: by its own examples.
        rows = rows[np.arange(batch_size * -(-len(rows) // batch_size)) % count]
        for block in table.blocks(rows, batch_size):
            part = compiled[type(table)](variables, block, union, np.int32(start))
            total = part if start == 0 else jax.tree.map(jnp.add, total, part)
            start += len(block.rows)
            if start >= count:
                break
            jax.block_until_ready(total)  # two blocks exist, not more
        return mean_metrics(total, union[1])

    return run


def rows_of(block: SegmentData, start: jax.Array) -> DeviceExamples:
    """Examples of a chunk's rows in order, from `start` on."""

    def places(example, position):
        del example
        return block.rows[start + jnp.arange(len(position), dtype=jnp.int32)]

    return DeviceExamples(block.dataset, places)


def union_view(batching, rows, count, examples, round) -> Client:
    """Treat the first `count` [] of the table's `rows` [R] as one client."""
    slot = single_slot(offset=rows[0], num_added=count)
    extra = Prepared(shared=(), added_rows=rows[None], num_added=count[None])
    return client_view(batching, 0, jax.random.key(0), slot, extra, examples, round)
