"""What a segment of a round holds: which waves, and where their rows lie.

Shapes come from the largest clients there are, not from those of a round, so nothing
compiles anew. The exception are added examples whose limit is above the size of the
largest client: a room for them is kept over the rounds, and a larger one is made, a
power of two with a quarter to spare, when a round has more.
"""

from typing import NamedTuple

import jax
import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.client import IDLE, Slots, column, unpack
from fedfr_jax.stream import Stream
from fedfr_jax.types import Dataset, PyTree


class Size(NamedTuple):
    """Static shape of a round's segments."""

    segments: int
    waves: int  # of a segment, on each device
    rows: int  # of a segment's table, on each device


class Layout(NamedTuple):
    """Who trains where, in host memory; n waves on a device in all, S segments of w."""

    rows: PyTree  # [A', S * w, L, ...] of this process' devices
    slots: Slots  # [A, S * w, L]: the segments one after the other
    starts: np.ndarray  # [A, S * w, L] int32 first row of the segment's table
    owner: np.ndarray  # [A, S * w] int32 which of the device's shards a wave is of
    order: np.ndarray  # [K] int32 place of each cohort member in `slots`
    num_waves: int  # n


def size_of(sim, works: list, num_tables: int = 1) -> Size:
    """Size of a round's segments that fits each of `works`.

    Args:
      num_tables: tables of that many rows which share the stream's memory.
    """
    shards, waves, lanes, _ = works[0].slots.shape
    largest = sim.population.largest(sim.cohort_size)
    most = max(int(column(work.slots, "num_extra").max()) for work in works)
    capacity = works[0].extra.examples.shape[1]
    return fit(
        sim.table._replace(memory=sim.table.memory // num_tables),
        np.cumsum(largest),
        lanes=lanes,
        waves=shards // sim.mesh.shape[meshes.CLIENTS] * waves,
        room=room_for(capacity, most, int(largest[0]), sim.segments.rooms),
    )


def fit(
    table: Stream, most_rows: np.ndarray, *, lanes: int, waves: int, room: int
) -> Size:
    """Cut `waves` into segments whose two tables fit `table.memory`, or single waves.

    Args:
      most_rows: [n] rows of the 1, 2, ... largest clients together.
      room: added examples per client.
    """
    count = np.arange(1, waves + 1) * lanes  # clients of a segment
    rows = most_rows[np.minimum(count, len(most_rows)) - 1] + count * room
    fits = int((2 * rows * table.row_bytes <= table.memory).sum())
    segments = -(-waves // max(min(table.waves or fits, waves), 1))
    size = -(-waves // segments)
    return Size(segments, size, int(rows[size - 1]))


def room_for(capacity: int, most: int, max_local: int, known: set[int]) -> int:
    """Added examples per client that a segment has room for, see the module.

    Args:
      known: the rooms so far, to which a new one is added.
    """
    if capacity <= max_local:
        return capacity
    if not any(room >= most for room in known):
        known.add(min(capacity, 1 << max(most + most // 4 - 1, 0).bit_length()))
    return min(room for room in known if room >= most)


def lay_out(work, num_devices: int, size: Size) -> Layout:
    """Cut a round's `Work` [V, W, L] into segments; idle waves fill up the last."""
    shards, waves, lanes, _ = work.slots.shape
    num_waves = shards // num_devices * waves
    padding = size.segments * size.waves - num_waves

    def flat(x, fill=0):
        places = x.shape[0] * x.shape[1] // num_waves
        x = x.reshape(places, num_waves, *x.shape[2:])
        tail = np.broadcast_to(fill, (len(x), padding, *x.shape[2:])).astype(x.dtype)
        return np.concatenate([x, tail], axis=1) if padding else x

    slots = unpack(flat(work.slots, IDLE))
    count = slots.num_local + slots.num_extra  # 0 where idle
    part = count.reshape(num_devices, size.segments, -1)
    starts = (np.cumsum(part, axis=2) - part).reshape(count.shape).astype(np.int32)
    owner = np.arange(num_waves + padding, dtype=np.int32) // waves
    owner = np.minimum(owner, shards // num_devices - 1)
    device = work.order // (num_waves * lanes)
    return Layout(
        jax.tree.map(flat, work.rows),
        slots,
        starts,
        np.tile(owner, (num_devices, 1)),
        (work.order + device * padding * lanes).astype(np.int32),
        num_waves,
    )


def read_rows(
    table: Stream, slots: Slots, starts: np.ndarray, examples: np.ndarray, rows: int
) -> Dataset:
    """The data set [rows, ...] of one device's slots [w, L] in host memory.

    Args:
      examples: [K, X] int32 rows that the server adds.
    """
    zeros = lambda x: np.zeros((rows, *x.shape), x.dtype)
    found = jax.tree.map(zeros, table.example)
    for place in zip(*np.nonzero(slots.client >= 0), strict=True):
        slot = jax.tree.map(lambda x, p=place: int(x[p]), slots)
        own = np.arange(slot.offset, slot.offset + slot.num_local)
        wanted = np.concatenate([own, examples[slot.place, : slot.num_extra]])
        here = slice(starts[place], starts[place] + len(wanted))

        def put(whole, own, here=here):
            whole[here] = own

        jax.tree.map(put, found, table.take(wanted))
    return found
