"""Batches of central training: permuted rows, in chunks.

A chunk has the examples of some steps, contiguous for each device. Those of a `Dataset`
are gathered on the devices, those of a `Stream` are read on the host; the next chunk is
loaded while the devices train on the one before. Every example of a batch is augmented
with its own key, a function of (seed, epoch, step, index in the batch).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax.data.batching import Batching
from fedfr_jax.data.permutation import permute_on_host
from fedfr_jax.data.stream import Stream
from fedfr_jax.types import Batch, Dataset

CENTRAL = 2**31 + 1  # folded into the seed; clients fold their ids, below 2^31
# Specs in place of arrays, of trees that are sharded over the devices or whole.
SHARDED: Any = P(meshes.CLIENTS)
WHOLE: Any = P()
TO_SHARD = Batch(*[SHARDED] * len(Batch._fields))._replace(num_classes=WHOLE)


class Chunk(NamedTuple):
    """Stored examples of the steps first, ..., last - 1, sharded over the devices."""

    rows: jax.Array  # [A * k * part] int32 of the data set: devices, steps, examples
    examples: Dataset  # of [A * k * part, ...]
    is_first: np.int32
    is_last: np.int32  # at most first + k


class EpochOrder(NamedTuple):
    """Rows to train on and their order, in batches."""

    first_row: int
    num_rows: int
    batch_size: int  # over all devices
    num_devices: int
    seed: int
    batch_order: Callable | None = None  # as `CentralTrainer.batch_order`

    @property
    def num_steps(self) -> int:
        """Number of full batches in an epoch."""
        return self.num_rows // self.batch_size

    @property
    def part(self) -> int:
        """Number of examples of a batch on each device."""
        return self.batch_size // self.num_devices

    def key(self, epoch: jax.Array | int) -> jax.Array:
        """PRNG key of an epoch."""
        stage = jax.random.fold_in(jax.random.key(self.seed), CENTRAL)
        return jax.random.fold_in(stage, epoch)

    def word(self, epoch: int) -> int:
        """Seed of the epoch's permutation."""
        key = jax.random.fold_in(jax.random.fold_in(self.key(epoch), 1), 0)
        return int(jax.random.bits(key, dtype=jnp.uint32))

    def rows(
        self, word: int, first: int, count: int, listed: np.ndarray | None = None
    ) -> np.ndarray:
        """Rows of steps first, ..., first + count - 1, [A, count, part] int32.

        Args:
          listed: [S, B] indices of rows; None for a permutation.
        """
        devices = np.arange(self.num_devices)[:, None, None] * self.part
        steps = first + np.arange(count)[:, None]
        columns = devices + np.arange(self.part)
        # Steps after the epoch's last repeat a row; they are not trained on.
        num_listed = self.num_rows if listed is None else listed.size
        position = np.minimum(steps * self.batch_size + columns, num_listed - 1)
        if listed is None:
            row = permute_on_host(word, position.ravel(), self.num_rows)
        else:
            row = listed.ravel()[position.ravel()]
        return (row + self.first_row).astype(np.int32).reshape(position.shape)


def epoch_chunks(
    dataset: Dataset | Stream, order: EpochOrder, epoch: int, mesh: Mesh
) -> Iterator[Chunk]:
    """Yield an epoch's chunks, of equal shape; two fit the data set's `memory`."""
    count, size = _count_and_steps(dataset, order)
    word = order.word(epoch)
    listed = order.batch_order(word, order.num_steps) if order.batch_order else None

    def rows_of(i):
        rows = order.rows(word, i * size, size, listed).ravel()
        return meshes.put_global(rows, meshes.over_clients(mesh))

    for i, (rows, examples) in enumerate(dataset.chunks(rows_of, count)):
        first, last = i * size, min((i + 1) * size, order.num_steps)
        yield Chunk(rows, examples, np.int32(first), np.int32(last))


def chunk_shapes(dataset: Dataset | Stream, order: EpochOrder, mesh: Mesh) -> Chunk:
    """A chunk of `epoch_chunks` as ShapeDtypeStructs with shardings."""
    _, size = _count_and_steps(dataset, order)
    length, cut = order.batch_size * size, meshes.over_clients(mesh)

    def rows_of(example) -> Any:
        shape = length, *example.shape
        return jax.ShapeDtypeStruct(shape, example.dtype, sharding=cut)

    if isinstance(dataset, Stream):
        example = dataset.example
    else:
        example_struct = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        example = jax.tree.map(example_struct, dataset)
    return Chunk(
        rows=rows_of(np.int32(0)),
        examples=jax.tree.map(rows_of, example),
        is_first=np.int32(0),
        is_last=np.int32(size),
    )


def _count_and_steps(dataset, order):
    """(chunks of an epoch, steps of each); two chunks fit the data set's `memory`."""
    fits = max(dataset.memory // (2 * dataset.example_bytes * order.part), 1)
    count = -(-order.num_steps // fits)
    return count, -(-order.num_steps // count)


def build_batch(
    batching: Batching,
    order: EpochOrder,
    mesh: Mesh,
    annotate_batch: Callable | None = None,
) -> Callable:
    """Build batch(chunk, key, step) -> `Batch` of [B], augmented and sharded.

    All examples count as added by a server, for losses that treat those and a client's
    own examples differently: their labels are global classes.

    Args:
      annotate_batch: see `CentralTrainer.annotate_batch`.
    """

    def of_part(piece: Chunk, key, step):
        start = (step - piece.is_first) * order.part
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, order.part)
        row, stored = jax.tree.map(cut, (piece.rows, piece.examples))
        index = jnp.arange(order.part, dtype=jnp.int32)
        number = jax.lax.axis_index(meshes.CLIENTS) * order.part + index
        inputs, targets, view = batching.augment_batch(key, step, number, *stored)
        always = jnp.ones(order.part, bool)
        return Batch(
            inputs=inputs,
            targets=targets,
            num_classes=jnp.int32(0),
            is_valid=always,
            is_added=always,
            row=row,
            position=row - order.first_row,
            view_index=view,
        )

    specs = Chunk(SHARDED, SHARDED, WHOLE, WHOLE), WHOLE, WHOLE
    batch = meshes.over_client_devices(mesh, of_part, specs, TO_SHARD)
    if annotate_batch is None:
        return batch
    return lambda chunk, key, step: annotate_batch(batch(chunk, key, step))
