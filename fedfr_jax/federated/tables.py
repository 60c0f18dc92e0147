"""Where the examples of a round lie: two kinds of table, one contract.

`Resident`: a `Dataset` on every device; a round is one segment, whose clients find
their examples at the data set's own rows. `Streamed`: a `Stream` on the host; a
segment's table holds on each device the rows of that device's clients, each client's
own examples followed by those that the server adds, and is read while the segment
before trains.

A kind has, beside its methods, `spec` (how a segment's table is cut over the devices)
and `held(dataset, start) -> Held` (how a client finds its examples in it).
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.client import Held, all_rows, column, lists
from fedfr_jax.federated.layout import (
    Layout,
    Size,
    Work,
    fit,
    num_waves,
    read_rows,
    room_for,
)
from fedfr_jax.stream import Stream, ahead, blocks, on_own_devices, placed
from fedfr_jax.types import Dataset


class Block(NamedTuple):
    """Rows of a table that are worked on together, cut over the client devices."""

    dataset: Dataset
    rows: jax.Array  # [A * b] int32 where they lie in a device's own data set


class Resident:
    """A data set on every device of the mesh."""

    spec, is_streamed = P(), False

    def __init__(self, dataset: Dataset, mesh: Mesh):
        self.dataset, self.mesh = dataset, mesh

    @staticmethod
    def held(dataset: Dataset, start: jax.Array) -> Held:
        """Each example lies at its own row."""
        del start
        return all_rows(dataset)

    def size_of(
        self, works: list[Work], largest: np.ndarray, num_tables: int = 1
    ) -> Size:
        """One segment of all waves."""
        del largest, num_tables
        return Size(1, num_waves(works[0], self.mesh), 0)

    def segments(self, size: Size, load: Callable, lists: list) -> Iterator[tuple]:
        """What `load(0)` gives, and the data set."""
        del size, lists
        yield *load(0), self.dataset

    def shapes(self, size: Size) -> Dataset:
        """The table of a segment: the data set itself."""
        del size
        return self.dataset

    def blocks(self, rows: np.ndarray, batch_size: int) -> Iterator[Block]:
        """`rows` [R] as one block, filled up with row 0 to whole batches per device."""
        whole = self.mesh.shape[meshes.CLIENTS] * batch_size
        rows = np.pad(rows, (0, -len(rows) % whole)).astype(np.int32)
        yield Block(self.dataset, meshes.put(rows, meshes.over_clients(self.mesh)))

    def waited(self) -> float:
        """Seconds: nothing is waited for."""
        return 0.0


class Streamed:
    """A stream, of which each segment of a round has a table of its own."""

    spec, is_streamed = P(meshes.CLIENTS), True
    held = staticmethod(lists)

    def __init__(self, stream: Stream, mesh: Mesh):
        self.dataset, self.mesh = stream, mesh
        self.rooms = set()  # for added examples, see `layout.room_for`

    def size_of(
        self, works: list[Work], largest: np.ndarray, num_tables: int = 1
    ) -> Size:
        """Size of a round's segments that fits each of `works`.

        Args:
          largest: examples of the cohort's largest clients, falling.
          num_tables: tables of that many rows which share the stream's memory.
        """
        most = max(int(column(work.slots, "num_extra").max()) for work in works)
        capacity = works[0].extra.examples.shape[1]
        return fit(
            self.dataset,
            np.cumsum(largest),
            memory=self.dataset.memory // num_tables,
            lanes=works[0].slots.shape[2],
            waves=num_waves(works[0], self.mesh),
            room=room_for(capacity, most, int(largest[0]), self.rooms),
        )

    def segments(
        self, size: Size, load: Callable, lists: list[tuple[Layout, np.ndarray]]
    ) -> Iterator[tuple]:
        """What `load(i)` gives and the i-th table, each made while the one before is
        trained.

        Args:
          lists: what a table holds, one part after the other: the rows of a layout's
            clients, and the examples [K, X] that the server adds.
        """
        lists = [(layout.slots, meshes.fetch(examples)) for layout, examples in lists]

        def make(i):
            here = slice(i * size.waves, (i + 1) * size.waves)

            def table(a):
                parts = [(slots[a, here], examples) for slots, examples in lists]
                return read_rows(self.dataset, parts, len(lists) * size.rows)

            return *load(i), on_own_devices(self.mesh, table)

        return ahead(make, size.segments, self.dataset.waits)

    def shapes(self, size: Size) -> Dataset:
        """The table of a segment, as shapes."""
        count = size.rows * self.mesh.shape[meshes.CLIENTS]
        place = meshes.over_clients(self.mesh)
        shape = lambda x: jax.ShapeDtypeStruct(
            (count, *x.shape), x.dtype, sharding=place
        )
        return jax.tree.map(shape, self.dataset.example)

    def blocks(self, rows: np.ndarray, batch_size: int) -> Iterator[Block]:
        """`rows` [R] in order, filled up with row 0, in blocks that fit its memory."""
        count, place = self.mesh.shape[meshes.CLIENTS], meshes.over_clients(self.mesh)
        for read in blocks(self.dataset, rows, self.mesh, batch_size):
            own = np.arange(read.num_examples // count, dtype=np.int32)
            yield Block(read, meshes.put(np.tile(own, count), place))

    def waited(self) -> float:
        """Seconds of waiting for pieces since this was last asked."""
        waits = self.dataset.waits[:]
        self.dataset.waits.clear()
        return sum(waits)


KINDS = Resident, Streamed


def table_on(mesh: Mesh, table: Dataset | Stream) -> Resident | Streamed:
    """The table for rounds on the mesh; a `Dataset` is copied to every device."""
    if isinstance(table, Stream):
        return Streamed(table, mesh)
    return Resident(placed(table, mesh), mesh)
