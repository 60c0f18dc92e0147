"""Client scheduling: waves of similar length, longest first.

A wave of L lanes runs as many steps as its longest client, so clients are divided into
waves by falling number of steps, which is the least that waves can take together. Whole
waves are assigned to partial sums, the longest first, each to the least loaded one that
has a place left (Graham 1969). A device runs one partial sum, or several of a number
that does not depend on the devices.
"""

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

MAX_STEPS_PER_LOOP = 64  # beyond, the host's time is negligible
HOST_COST = 0.1  # of an iteration that a GPU waits for, in steps
MIN_GAIN = 0.02  # of a second length, for which the step is compiled once more


def choose_steps_per_loop(num_steps: np.ndarray) -> tuple[int, ...]:
    """Lengths of counted loops, falling: one or two in [1, 64], or () for none.

    Those with the fewest steps, where a turn of a loop counts `HOST_COST` steps.

    Args:
      num_steps: [n] of clients.
    """
    lengths = range(1, MAX_STEPS_PER_LOOP + 1)
    cost = np.full((len(lengths), len(lengths)), np.inf)
    for long in lengths:
        for short in lengths[:long]:
            executed, turns = count_loops(num_steps, (long, short))
            cost[long - 1, short - 1] = executed + HOST_COST * turns
    single, (long, short) = cost.diagonal(), np.divmod(cost.argmin(), len(lengths))
    if cost.min() < (1 - MIN_GAIN) * single.min():
        return int(long) + 1, int(short) + 1
    best = int(single.argmin()) + 1
    return (best,) if best > 1 else ()


def count_loops(num_steps: np.ndarray, lengths: tuple[int, ...]) -> tuple[int, int]:
    """(steps, loops) that clients or waves of `num_steps` [n] run, see `run_steps`."""
    executed = turns = 0
    for length in lengths:
        is_last = length == lengths[-1]
        loops = -(-num_steps // length) if is_last else num_steps // length
        executed, turns = executed + length * loops.sum(), turns + loops.sum()
        num_steps = num_steps - length * loops
    return int(executed), int(turns)


class Schedule(NamedTuple):
    """Assignment of a cohort to V partial sums x W waves x L lanes."""

    slots: np.ndarray  # [V, W, L] int32 place in the cohort, -1 where idle
    executed_steps: int  # lanes x longest client, summed over waves and partial sums
    useful_steps: int  # sum of the clients' steps
    imbalance: float  # busiest device's wave steps over the mean device's, >= 1

    @property
    def padding_ratio(self) -> float:
        """Steps of lanes that train over useful ones, >= 1."""
        return self.executed_steps / max(self.useful_steps, 1)

    @property
    def idle_ratio(self) -> float:
        """Steps until the busiest device has ended, of all lanes, over useful ones."""
        return self.imbalance * self.padding_ratio


def num_waves(
    cohort_size: int, lanes: int, num_devices: int, partial_sums: int | None = None
) -> int:
    """Waves that a device runs one after the other, see `build_schedule`."""
    sums = partial_sums or num_devices
    return -(-cohort_size // (sums * lanes)) * -(-sums // num_devices)


def choose_lanes(
    seconds_of: Callable[[int], float], waves_of: Callable[[int], int], most: int
) -> int:
    """Lanes in [1, most] with which a round is shortest; the fewest of equals.

    Args:
      seconds_of: number of lanes -> duration of a step of all of them, which does not
        fall: of the numbers with as many waves the smallest is tried.
      waves_of: number of lanes -> waves of the busiest device, see `num_waves`.
    """
    tried = [n for n in range(1, most + 1) if n == 1 or waves_of(n) < waves_of(n - 1)]
    return min(tried, key=lambda n: (waves_of(n) * seconds_of(n), n))


def build_schedule(
    num_steps: np.ndarray,
    *,
    num_devices: int,
    lanes: int,
    partial_sums: int | None = None,
    ids: np.ndarray | None = None,
) -> Schedule:
    """Assign clients with `num_steps` [K] to partial sums and waves.

    Every partial sum has ceil(K / V) places, rounded up to whole waves, so that shapes
    depend on K alone and cohorts share a compiled program.

    Args:
      partial_sums: V, whatever the devices, each of which runs V / devices of them one
        after the other; idle ones fill up the last device. None takes one per device.
      ids: [K] of the clients, by which ties are broken; None: by place.
    """
    count, partial_sums = len(num_steps), partial_sums or num_devices
    ties = np.arange(count) if ids is None else ids
    order = np.lexsort((ties, -num_steps))
    waves = num_waves(count, lanes, partial_sums)  # of a partial sum
    cut = np.full((-(-count // lanes), lanes), -1, np.int32)
    cut.reshape(-1)[:count] = order
    whole = -(-partial_sums // num_devices) * num_devices
    slots = np.full((whole, waves, lanes), -1, np.int32)
    slots[_assign(num_steps[cut[:, 0]], partial_sums, waves)] = cut
    steps = np.where(slots >= 0, np.take(num_steps, slots, mode="clip"), 0)
    longest = steps.max(axis=2).reshape(num_devices, -1).sum(axis=1)  # [A]
    executed = int(longest.sum())
    return Schedule(
        slots=slots,
        executed_steps=executed * lanes,
        useful_steps=int(num_steps.sum()),
        imbalance=int(longest.max()) * num_devices / executed if executed else 0.0,
    )


def _assign(length: np.ndarray, partial_sums: int, places: int) -> tuple:
    """Partial sum and index [n] of waves of descending `length`: the least loaded."""
    if partial_sums == 1:
        return 0, slice(len(length))
    # Among equals by reversed bits, so that a device's sums do not come together.
    sum_of = sorted(range(partial_sums), key=lambda i: f"{i:032b}"[::-1])
    loads, owners, places_of_waves = [(0, 0, i) for i in range(partial_sums)], [], []
    for steps in length.tolist():
        load, place, i = loads[0]
        owners.append(sum_of[i])
        places_of_waves.append(place)
        if place + 1 < places:
            heapq.heapreplace(loads, (load + steps, place + 1, i))
        else:
            heapq.heappop(loads)
    return owners, places_of_waves
