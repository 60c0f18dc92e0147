"""What a segment of a round holds: which waves, and where their rows lie.

Shapes come from the largest clients there are, not from those of a round, so nothing
compiles anew. The exception are added examples whose limit is above the size of the
largest client: a room for them is kept over the rounds, and a larger one is made, a
power of two with a quarter to spare, when a round has more.
"""

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from fedfr_jax import mesh as meshes
from fedfr_jax.federated.client import IDLE, column, unpack
from fedfr_jax.federated.schedule import Plan
from fedfr_jax.stream import Stream
from fedfr_jax.types import Dataset, Extra, PyTree


class Work(NamedTuple):
    """A round's arguments in host memory, and what they mean."""

    rows: PyTree  # [V', W, L, ...] personal rows of this process' shards
    slots: np.ndarray  # [V, W, L, 11] int32, see `client.unpack`
    order: np.ndarray  # [K] int32 flat slot of each cohort member
    extra: Extra
    clients: np.ndarray  # [V, W, L] ids, -1 where idle
    own: np.ndarray  # [V'] this process' shards, all of them in a single process
    plan: Plan


class Size(NamedTuple):
    """Static shape of a round's segments."""

    segments: int
    waves: int  # of a segment, on each device
    rows: int  # of a segment's table on each device, where it has one of its own


class Layout(NamedTuple):
    """Who trains where, in host memory; n waves on a device in all, S segments of w."""

    rows: PyTree  # [A', S * w, L, ...] of this process' devices
    slots: np.ndarray  # [A, S * w, L, 11] packed, the segments one after the other
    order: np.ndarray  # [K] int32 place of each cohort member in `slots`
    num_waves: int  # n


def num_waves(work: Work, mesh: Mesh) -> int:
    """Waves that a `Work` has on each device."""
    shards, waves = work.slots.shape[:2]
    return shards // mesh.shape[meshes.CLIENTS] * waves


def fit(
    table: Stream,
    most_rows: np.ndarray,
    *,
    memory: int,
    lanes: int,
    waves: int,
    room: int,
) -> Size:
    """Cut `waves` into segments whose two tables fit `memory`, or single waves.

    Args:
      most_rows: [n] rows of the 1, 2, ... largest clients together.
      memory: bytes on a device.
      room: added examples per client.
    """
    count = np.arange(1, waves + 1) * lanes  # clients of a segment
    rows = most_rows[np.minimum(count, len(most_rows)) - 1] + count * room
    fits = int((2 * rows * table.row_bytes <= memory).sum())
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


def lay_out(work: Work, mesh: Mesh, size: Size, first_row: int = 0) -> Layout:
    """Cut a round's `Work` [V, W, L] into segments; idle waves fill up the last.

    Args:
      first_row: where its part of a segment's table begins.
    """
    num_devices, used = mesh.shape[meshes.CLIENTS], num_waves(work, mesh)
    waves, lanes = work.slots.shape[1:3]
    padding = size.segments * size.waves - used

    def flat(x, fill=0):
        x = x.reshape(-1, used, *x.shape[2:])
        tail = np.broadcast_to(fill, (len(x), padding, *x.shape[2:])).astype(x.dtype)
        return np.concatenate([x, tail], axis=1) if padding else x

    slots = flat(work.slots, IDLE)
    count = column(slots, "num_local") + column(slots, "num_extra")  # 0 where idle
    part = count.reshape(num_devices, size.segments, -1)
    starts = first_row + np.cumsum(part, axis=2) - part
    column(slots, "start")[:] = starts.reshape(count.shape)
    shard = np.minimum(np.arange(used + padding), used - 1) // waves
    column(slots, "shard")[:] = shard[:, None]
    device = work.order // (used * lanes)
    order = (work.order + device * padding * lanes).astype(np.int32)
    return Layout(jax.tree.map(flat, work.rows), slots, order, used)


def read_rows(
    table: Stream, parts: list[tuple[np.ndarray, np.ndarray]], rows: int
) -> Dataset:
    """The data set [rows, ...] of one device's slots in host memory.

    Args:
      parts: packed slots [w, L, 11], and the rows [K, X] int32 that the server adds.
    """
    zeros = lambda x: np.zeros((rows, *x.shape), x.dtype)
    found = jax.tree.map(zeros, table.example)
    for packed, examples in parts:
        for numbers in packed[column(packed, "client") >= 0]:
            slot = jax.tree.map(int, unpack(numbers))
            own = np.arange(slot.offset, slot.offset + slot.num_local)
            wanted = np.concatenate([own, examples[slot.place, : slot.num_extra]])

            def put(whole, own, first=slot.start):
                whole[first : first + len(own)] = own

            jax.tree.map(put, found, table.take(wanted))
    return found
