"""Examples of a round: on every device, or read segment by segment.

`DeviceData`: a `Dataset` on every device; a round is one segment, and an example's
index is its row in the data set. `StreamedData`: a `Stream` on the host; a segment's
data set holds on each device the rows of that device's clients, each client's own
examples followed by those that the server adds, and is read while the segment before it
trains. Both have `spec` (how a segment's data set is sharded over the devices) and
`device_examples` (how a client finds its examples in it).

Shapes depend on the largest clients of the population, not on those of a round, so a
round compiles once. The exception are added examples whose limit is above the size of
the largest client: their capacity grows with the rounds, to a power of two at least a
quarter above what a round needs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedfr_jax import mesh as meshes
from fedfr_jax.data.stream import (
    Stream,
    cut_blocks,
    place_examples,
    put_on_local_devices,
)
from fedfr_jax.federated.client import (
    IDLE,
    DeviceExamples,
    all_rows,
    column,
    listed_rows,
)
from fedfr_jax.federated.schedule import Schedule
from fedfr_jax.types import AnyArray, Dataset, Prepared, PyTree


class RoundInputs(NamedTuple):
    """Inputs of a round in host memory, for A devices with w waves of L lanes."""

    rows: PyTree  # [A', w, L, ...] client states of this process' devices
    slots: np.ndarray  # [A, w, L, 11] int32, see `client.unpack_slots`
    order: np.ndarray  # [K] int32 flat slot of each cohort member
    added: Prepared
    plan: Schedule


class StreamShape(NamedTuple):
    """Static shape of a round's segments."""

    segments: int
    waves: int  # of a segment, on each device
    rows: int  # of a segment's table on each device; 0: all devices have the data set
    room: int | None = None  # capacity for a client's added examples; None: no limit


def fit_waves(
    table: Stream,
    max_rows: np.ndarray,
    *,
    memory: int,
    lanes: int,
    waves: int,
    room: int,
) -> StreamShape:
    """Divide `waves` into segments of which two fit `memory`, or single waves.

    Args:
      max_rows: [n] rows of the 1, 2, ... largest clients together.
      memory: bytes on a device.
      room: added examples per client.
    """
    count = np.arange(1, waves + 1) * lanes  # clients of a segment
    rows = max_rows[np.minimum(count, len(max_rows)) - 1] + count * room
    fits = int((2 * rows * table.example_bytes <= memory).sum())
    segments = -(-waves // max(min(table.waves or fits, waves), 1))
    size = -(-waves // segments)
    return StreamShape(segments, size, int(rows[size - 1]), room)


def capacity_for(capacity: int, num_added: int, max_local: int, rooms: set[int]) -> int:
    """Number of added examples per client that a segment has room for.

    Args:
      num_added: the largest number in the round.
      rooms: capacities so far, to which a new one is added.
    """
    if capacity <= max_local:
        return capacity
    if not any(room >= num_added for room in rooms):
        spare = num_added + num_added // 4
        rooms.add(min(capacity, 1 << max(spare - 1, 0).bit_length()))
    return min(room for room in rooms if room >= num_added)


def in_segments(
    work: RoundInputs, size: StreamShape, first_row: int = 0
) -> RoundInputs:
    """Pad a round with idle waves to whole segments, and place its clients' examples.

    Args:
      first_row: where its part of a segment's table begins.
    """
    devices, waves, lanes, width = work.slots.shape
    padding = size.segments * size.waves - waves

    def pad(x, fill: AnyArray = 0):
        tail = np.broadcast_to(fill, (len(x), padding, *x.shape[2:])).astype(x.dtype)
        return np.concatenate([x, tail], axis=1)

    slots = pad(work.slots, IDLE[:width])
    count = column(slots, "num_examples") + column(slots, "num_added")  # 0 where idle
    part = count.reshape(devices, size.segments, -1)
    starts = first_row + np.cumsum(part, axis=2) - part
    column(slots, "start")[:] = starts.reshape(count.shape)
    order = work.order + work.order // (waves * lanes) * padding * lanes
    return work._replace(
        rows=jax.tree.map(pad, work.rows), slots=slots, order=order.astype(np.int32)
    )


def read_rows(
    table: Stream, parts: list[tuple[np.ndarray, np.ndarray]], rows: int
) -> Dataset:
    """The data set of one device's slots in host memory, `flat_examples`.

    Args:
      parts: packed slots [w, L, 11], and the rows [K, X] int32 that the server adds.
    """
    sources, places = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for packed, added_rows in parts:
        packed = packed[column(packed, "client") >= 0]
        counts, added = column(packed, "num_examples"), column(packed, "num_added")
        first = column(packed, "start")
        sources.append(ranges(column(packed, "offset"), counts))
        places += [ranges(first, counts), ranges(first + counts, added)]
        is_added = np.arange(added_rows.shape[1]) < added[:, None]
        sources.append(added_rows[column(packed, "cohort_index")][is_added])
    dataset = jax.tree.map(lambda x: np.zeros((rows, *x.shape), x.dtype), table.example)
    source, place = np.concatenate(sources), np.concatenate(places)
    examples = table.take(source) if len(source) else dataset
    for whole, x in zip(*map(jax.tree.leaves, (dataset, examples)), strict=True):
        whole[place] = x[: len(place)]
    return flat_examples(dataset)


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """start, ..., start + count - 1 of all [n], one after the other.

    >>> ranges(np.array([5, 1]), np.array([2, 3])).tolist()
    [5, 6, 1, 2, 3]
    """
    counts = counts.astype(np.int64)
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def flat_examples(tree: Dataset) -> Dataset:
    """Reshape arrays [rows, ...], or their shapes, to at most two axes.

    A TPU keeps arrays in tiles of two axes: all images of three channels would be
    copied to a new layout before a batch is gathered from them.
    """

    def flat(x):
        if x.ndim <= 2:
            return x
        shape = x.shape[0], math.prod(x.shape[1:])
        if isinstance(x, np.ndarray):
            return x.reshape(shape)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)

    return jax.tree.map(flat, tree)


class SegmentData(NamedTuple):
    """A chunk of rows and their data set, sharded over the client devices."""

    dataset: Dataset
    rows: AnyArray  # [A * b] int32 rows of each device's data set


class DeviceData:
    """A data set on every device of the mesh."""

    spec, is_streamed = P(), False

    def __init__(self, dataset: Dataset, mesh: Mesh):
        self.dataset, self.mesh = dataset, mesh

    @staticmethod
    def device_examples(dataset: Dataset, start: jax.Array) -> DeviceExamples:
        """Examples by their row in the data set."""
        del start
        return all_rows(dataset)

    def size_of(
        self, works: Sequence[RoundInputs], largest: np.ndarray, num_tables: int = 1
    ) -> StreamShape:
        """One segment with all waves."""
        return StreamShape(1, works[0].slots.shape[1], 0)

    def in_segments(
        self, work: RoundInputs, size: StreamShape, first_row: int
    ) -> RoundInputs:
        """The round as it is."""
        del size, first_row
        return work

    def segments(
        self, size: StreamShape, load: Callable, readers: list, num_tables: int
    ) -> Iterator[tuple]:
        """Yield `load(0)` and the data set."""
        del size, readers, num_tables
        yield *load(0), self.dataset

    def shapes(self, size: StreamShape) -> Dataset:
        """Shapes of a segment's examples: the data set itself."""
        del size
        return self.dataset

    def blocks(self, rows: np.ndarray, batch_size: int) -> Iterator[SegmentData]:
        """`rows` [R] as one chunk, padded with row 0 to full batches per device."""
        whole = self.mesh.shape[meshes.CLIENTS] * batch_size
        rows = np.pad(rows, (0, -len(rows) % whole)).astype(np.int32)
        yield SegmentData(
            self.dataset, meshes.put_global(rows, meshes.over_clients(self.mesh))
        )

    def input_wait(self) -> float:
        """Seconds of waiting for input: 0."""
        return 0.0


class StreamedData:
    """A stream, from which each segment of a round is read."""

    spec, is_streamed = P(meshes.CLIENTS), True

    def __init__(self, stream: Stream, mesh: Mesh):
        self.dataset, self.mesh = stream, mesh
        self.rooms = set()  # for added examples, see `capacity_for`

    def device_examples(self, table: Dataset, start: jax.Array) -> DeviceExamples:
        """A client's own rows of a segment's table, from `start` on."""
        return listed_rows(table, start)._replace(example=self.dataset.example)

    def size_of(
        self, works: Sequence[RoundInputs], largest: np.ndarray, num_tables: int = 1
    ) -> StreamShape:
        """Size of segments that fits each of `works`.

        Args:
          largest: examples of the cohort's largest clients, falling.
          num_tables: tables of that many rows which share the stream's memory.
        """
        max_added = max(int(column(work.slots, "num_added").max()) for work in works)
        capacity = works[0].added.added_rows.shape[1]
        return fit_waves(
            self.dataset,
            np.cumsum(largest),
            memory=self.dataset.memory // num_tables,
            lanes=works[0].slots.shape[2],
            waves=works[0].slots.shape[1],
            room=capacity_for(capacity, max_added, int(largest[0]), self.rooms),
        )

    def in_segments(
        self, work: RoundInputs, size: StreamShape, first_row: int
    ) -> RoundInputs:
        """The round in whole segments, see `in_segments`."""
        return in_segments(work, size, first_row)

    def segments(
        self,
        size: StreamShape,
        load: Callable,
        readers: list[RoundInputs],
        num_tables: int,
    ) -> Iterator[tuple]:
        """Yield `load(i)` and the i-th examples.

        Args:
          readers: whose clients' examples are the parts of a table, in order.
          num_tables: parts that a table has room for.
        """
        lists = [(x.slots, meshes.fetch(x.added.added_rows)) for x in readers]

        def make(i):
            waves = slice(i * size.waves, (i + 1) * size.waves)

            def table(device):
                parts = [(slots[device, waves], added) for slots, added in lists]
                return read_rows(self.dataset, parts, num_tables * size.rows)

            return *load(i), put_on_local_devices(self.mesh, table)

        return map(make, range(size.segments))

    def shapes(self, size: StreamShape) -> Dataset:
        """Shapes of a segment's examples."""
        count = size.rows * self.mesh.shape[meshes.CLIENTS]
        place = meshes.over_clients(self.mesh)

        def shape(x):
            return jax.ShapeDtypeStruct((count, *x.shape), x.dtype, sharding=place)

        return flat_examples(jax.tree.map(shape, self.dataset.example))

    def blocks(self, rows: np.ndarray, batch_size: int) -> Iterator[SegmentData]:
        """`rows` [R] in order, padded with row 0, in chunks that fit the memory."""
        count, place = self.mesh.shape[meshes.CLIENTS], meshes.over_clients(self.mesh)
        for read in cut_blocks(self.dataset, rows, self.mesh, batch_size):
            rows_of_device = np.arange(read.num_examples // count, dtype=np.int32)
            rows_of_all = meshes.put_global(np.tile(rows_of_device, count), place)
            yield SegmentData(read, rows_of_all)

    def input_wait(self) -> float:
        """Seconds of waiting for input since the last call."""
        waits = self.dataset.has_waited[:]
        self.dataset.has_waited.clear()
        return sum(waits)


DATA_KINDS = DeviceData, StreamedData


def place_data(mesh: Mesh, table: Dataset | Stream) -> DeviceData | StreamedData:
    """Data of rounds on the mesh; a `Dataset` is copied to every device."""
    placed = place_examples(table, mesh)
    if isinstance(placed, Stream):
        return StreamedData(placed, mesh)
    return DeviceData(placed, mesh)
