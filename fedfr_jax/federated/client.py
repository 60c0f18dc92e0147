"""Clients in the engine: rows of a data set, as batches.

Batches are gathered from the examples on the device and shuffled by a keyed
permutation, a function of (seed, round, client, epoch); each example is then augmented
with a key that depends on (seed, round, client, step, place in the batch). So a batch
can be made on any device, in any order, without state.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedfr_jax.data.batching import Batching
from fedfr_jax.data.permutation import permute
from fedfr_jax.types import AnyArray, Batch, Client, Dataset

CHUNK_SIZE = 2**16  # clients whose sizes are in memory together


class DeviceExamples(NamedTuple):
    """Examples that a lane can access, and where those of its client are."""

    dataset: Dataset  # of [R, ...]
    # (rows [B] of the data set, positions [B] in the client's list) -> [B] int32 places
    indices: Callable[[jax.Array, jax.Array], jax.Array]
    example: Dataset | None = None  # shapes of one, where the data set's are flat


def gather_examples(examples: DeviceExamples, places: jax.Array) -> tuple:
    """(inputs, targets) [B, ...] of the examples at `places` [B]."""
    arrays = jax.tree.map(lambda x: x[places], tuple(examples.dataset))
    if examples.example is None:
        return arrays

    def unflatten(x, example):
        return x.reshape(len(places), *example.shape)

    return jax.tree.map(unflatten, arrays, tuple(examples.example))


def all_rows(dataset: Dataset) -> DeviceExamples:
    """A whole data set, in which an example's index is its row."""

    def places(example, position):
        del position
        return example

    return DeviceExamples(dataset, places)


def listed_rows(dataset: Dataset, start: jax.Array) -> DeviceExamples:
    """Rows of some clients only, contiguous for each client.

    Args:
      start: [] int32 first row of this client.
    """

    def places(example, position):
        del example
        return start + position

    return DeviceExamples(dataset, places)


class EqualRows:
    """`Population.offsets` of N clients with `each` rows, without an array.

    Irregular offsets that do not fit memory may be a memory map,
    `np.load(path, mmap_mode="r")`.
    """

    def __init__(self, num_clients: int, each: int = 1):
        self.num_clients, self.each = num_clients, each

    def __len__(self) -> int:
        return self.num_clients + 1

    def __getitem__(self, index) -> Any:
        """Index like an array, by an int, a slice or an array of ints."""
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self)))
        elif not isinstance(index, np.ndarray):
            index = np.int64(range(len(self))[index])
        return index * self.each


class Population(NamedTuple):
    """Rows of each of the N clients, without copies.

    If all clients have M classes, `np.broadcast_to(np.int32(M), N)` takes four bytes.
    """

    # [N + 1] int: client i owns rows offsets[i]:offsets[i + 1]
    offsets: np.ndarray | EqualRows
    num_classes: np.ndarray  # [N] int32
    sizes_descending: np.ndarray = np.zeros(0, np.int64)  # [.] cached part of `largest`

    @property
    def num_clients(self) -> int:
        """Number of clients, N."""
        return len(self.num_classes)

    def sizes(self, ids: np.ndarray) -> np.ndarray:
        """Number of examples of clients `ids` [K]."""
        return self.offsets[ids + 1] - self.offsets[ids]

    def largest(self, count: int) -> np.ndarray:
        """Number of examples of the `count` largest clients, descending."""
        if count <= len(self.sizes_descending):
            return self.sizes_descending[:count]
        top = np.zeros(0, np.int64)
        for sizes in self.size_chunks(max(count, CHUNK_SIZE)):
            if len(top) == count:
                sizes = sizes[sizes > top[-1]]
            top = np.sort(np.concatenate([top, sizes]))[::-1][:count]
        return top

    def size_chunks(self, block: int = CHUNK_SIZE) -> Iterator[np.ndarray]:
        """Yield the number of examples of all clients, `block` at a time."""
        for start in range(0, len(self.offsets) - 1, block):
            yield np.diff(self.offsets[start : start + block + 1])


def cohort_rows(population: Population, ids: np.ndarray):
    """Rows of a cohort's clients, concatenated.

    Returns:
      rows [R] padded to the largest that any cohort of this size needs (so that shapes
      stay), and each client's starts [K] and counts [K] within them.
    """
    offsets: Any = population.offsets
    max_rows = int(population.largest(len(ids)).sum())
    counts = population.sizes(ids).astype(np.int32)
    starts = (np.cumsum(counts) - counts).astype(np.int32)
    rows = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in ids])
    return np.pad(rows, (0, max_rows - len(rows))), starts, counts


class SlotInputs(NamedTuple):
    """Inputs of a client's slot, [A, W, L] outside, scalars within a lane."""

    client: AnyArray  # [] int32 id, -1 where idle
    cohort_index: AnyArray  # [] int32 place in the cohort, 0 where idle
    is_new: AnyArray  # [] bool: no personal row yet
    offset: AnyArray  # [] int32 first row of the data set
    num_examples: AnyArray  # [] int32
    num_added: AnyArray  # [] int32
    num_classes: AnyArray  # [] int32
    num_steps: AnyArray  # [] int32
    start: AnyArray = 0  # [] int32 first row of the segment's own table
    partial_sum: AnyArray = 0  # [] int32 index of its sum on the device
    is_random_client: AnyArray = False  # [] bool: chosen at random in a cohort
    # [] bool: its update arrives; None: all updates arrive
    is_received: AnyArray = None
    staleness: AnyArray = None  # [] int32: rounds ago that it began; None: 0


IDLE = np.array([-1, *[0] * (len(SlotInputs._fields) - 1)], np.int32)  # a packed slot


def num_columns(has_participation: bool) -> int:
    """Number of columns of a packed slot; two more if clients may be absent."""
    return len(SlotInputs._fields) - (0 if has_participation else 2)


def pack_slots(clients: SlotInputs, places: np.ndarray) -> np.ndarray:
    """Pack the inputs of a cohort's clients, [K] or scalars, into their slots.

    Args:
      places: [...] int place in the cohort, -1 where idle.

    Returns:
      [..., 11] int32, or 13 with `is_received`, one array for one copy to a device.
    """
    width = num_columns(clients.is_received is not None)
    numbers = np.empty((len(clients.client) + 1, width), np.int32)
    for i, values in enumerate(clients[:width]):
        numbers[:-1, i] = values
    numbers[-1] = IDLE[:width]
    return numbers.take(places, axis=0, mode="wrap")


def column(packed: np.ndarray, name: str) -> np.ndarray:
    """One field of packed slots, as a view."""
    return packed[..., SlotInputs._fields.index(name)]


class SharedSlots(NamedTuple):
    """Slots of members that train the same clients, some of which they leave out."""

    packed: AnyArray  # [..., 13] int32, the same for all members
    is_random_client: AnyArray  # [...] int32, a member's
    is_received: AnyArray  # [...] int32, a member's


def share_slots(slots: Sequence[np.ndarray], axis: int) -> SharedSlots:
    """Join the packed slots [..., 13] of members that train the same clients.

    A slot is that of a member that does not leave its client out.

    Args:
      axis: of the members in what they do not share.
    """
    every = np.stack(slots)
    first = (column(every, "client") >= 0).argmax(0)[None, ..., None]
    packed = np.take_along_axis(every, first, 0)[0]
    of_members = np.stack(slots, axis)
    own = [column(of_members, name) for name in SharedSlots._fields[1:]]
    return SharedSlots(packed, *own)


def unpack_slots(packed: np.ndarray | jax.Array | SharedSlots) -> SlotInputs:
    """Unpack the slots [..., 11 or 13] of `pack_slots`, on the host or within jit."""
    if isinstance(packed, SharedSlots):
        own = {name: x > 0 for name, x in packed._asdict().items() if name != "packed"}
        return unpack_slots(packed.packed)._replace(**own)
    slots = SlotInputs(*(packed[..., i] for i in range(packed.shape[-1])))
    slots = slots._replace(
        is_new=slots.is_new > 0, is_random_client=slots.is_random_client > 0
    )
    if slots.is_received is None:
        return slots
    return slots._replace(is_received=slots.is_received > 0)


def single_slot(**numbers: AnyArray) -> SlotInputs:
    """Slot inputs of one client outside of a schedule; 0 where none is given."""
    values = [numbers.get(name, 0) for name in SlotInputs._fields]
    columns = [jnp.asarray(x, jnp.int32) for x in values[: num_columns(False)]]
    return unpack_slots(jnp.stack(columns))


def client_key(key: jax.Array, client: jax.Array | int) -> jax.Array:
    """PRNG key of a client, from the run's."""
    return jax.random.fold_in(key, client)


def first_personal_key(key: jax.Array) -> jax.Array:
    """PRNG key of a client's initial personal state, from the client's key."""
    return jax.random.fold_in(key, 0)


def server_key(key: jax.Array, round: jax.Array) -> jax.Array:
    """PRNG key of the server after a round, from the run's; no client has it."""
    return jax.random.fold_in(jax.random.fold_in(key, jnp.uint32(2**32 - 2)), round)


def client_view(
    batching: Batching,
    max_local: int,
    key,
    slot,
    extra,
    examples: DeviceExamples,
    round,
    *,
    shard=(0, 1),
) -> Client:
    """Build the `Client` of an algorithm: numbers, and functions that return batches.

    Args:
      batching: how batches are made.
      max_local: static bound on the examples of a client, without added ones.
      key: a function of (seed, round, client).
      slot, extra, examples, round: inputs of the engine's lane.
      shard: (i, n): batches are the i-th of n equal parts, for a client that is
        trained data parallel.
    """
    count, staleness = slot.num_examples + slot.num_added, slot.staleness
    part = batching.batch_size // shard[1]
    bound = max_local + extra.added_rows.shape[1]
    per_epoch = jnp.maximum(batching.steps_per_epoch(count), 1)
    shuffle_key, augment_key = jax.random.fold_in(key, 1), jax.random.fold_in(key, 2)

    def stored_at(position):
        """Batch of positions [B], before augmentation."""
        is_valid = position < count
        # `%` and `//` would compile the treatment of negative numbers. Padding repeats
        # the client's own examples, in batch statistics too; it never reads another
        # client's rows.
        position = lax.rem(position, jnp.maximum(count, 1))
        is_added = position >= slot.num_examples
        row = slot.offset + position
        if capacity := extra.added_rows.shape[1]:
            number = jnp.clip(position - slot.num_examples, 0, capacity - 1)
            row = jnp.where(is_added, extra.added_rows[slot.cohort_index, number], row)
        place = examples.indices(row, position)
        with jax.named_scope("gather"):
            inputs, targets = gather_examples(examples, place)
        return Batch(
            inputs=inputs,
            targets=targets,
            num_classes=slot.num_classes,
            is_valid=is_valid,
            is_added=is_added & is_valid,
            row=row,
            position=position,
            view_index=jnp.zeros_like(position),
        )

    def places():  # [B] of a step's examples in the whole batch
        return shard[0] * part + jnp.arange(part, dtype=jnp.int32)

    def batch(step):
        position = lax.rem(step, per_epoch) * batching.batch_size + places()
        if batching.shuffle:
            epoch_key = jax.random.fold_in(shuffle_key, lax.div(step, per_epoch))
            position = _shuffle(epoch_key, position, count)
        return augment(step, stored_at(position))

    def batch_at(step, positions):
        return augment(step, stored_at(positions[places()]))

    def augment(step, stored):
        inputs, targets, view = batching.augment_batch(
            augment_key, step, places(), stored.inputs, stored.targets
        )
        return stored._replace(inputs=inputs, targets=targets, view_index=view)

    def batch_from(start, view):
        plain = stored_at(start + jnp.arange(batching.batch_size, dtype=jnp.int32))
        inputs = batching.with_deterministic(view, plain.inputs)
        return plain._replace(inputs=inputs, view_index=jnp.full_like(plain.row, view))

    return Client(
        id=slot.client,
        cohort_index=slot.cohort_index,
        is_random_client=slot.is_random_client,
        round=round if staleness is None else round - staleness,
        num_examples=slot.num_examples,
        num_added=slot.num_added,
        num_classes=slot.num_classes,
        num_steps=slot.num_steps,
        step_to_epoch=lambda step: lax.div(step, per_epoch),
        steps_per_epoch=per_epoch,
        batch=batch,
        batch_at=batch_at,
        batch_from=batch_from,
        max_positions=batching.batch_size * -(-bound // batching.batch_size),
        num_views=batching.num_views,
        shared=extra.shared,
        staleness=0 if staleness is None else staleness,
    )


def _shuffle(key: jax.Array, position: jax.Array, count: jax.Array) -> jax.Array:
    """Indices of positions [B] in an epoch's order of `count` examples."""
    word = jax.random.bits(key, dtype=jnp.uint32)
    return permute(word, position, jnp.maximum(count, 1))
