"""Which shard trains which client when: longest processing time first, then waves.

Clients are dealt to shards by falling number of steps, each to the least loaded shard
that has a place left (Graham 1969), and a shard's clients, still by falling steps, are
cut into waves of L lanes: a wave runs as many steps as its longest client. A device
runs one shard, or several of a number that does not depend on the devices.
"""

import heapq
from typing import NamedTuple

import numpy as np


class Plan(NamedTuple):
    """Places of a cohort on V shards x W waves x L lanes."""

    slots: np.ndarray  # [V, W, L] int32 place in the cohort, -1 where idle
    executed_steps: int  # lanes x longest client, summed over waves and shards
    useful_steps: int  # sum of the clients' steps
    imbalance: float  # busiest device's wave steps over the mean device's, >= 1


def schedule(
    num_steps: np.ndarray,
    *,
    num_devices: int,
    lanes: int,
    shards: int | None = None,
    ids: np.ndarray | None = None,
) -> Plan:
    """Deal clients with `num_steps` [K] to shards and waves.

    Every shard has ceil(K / V) places, rounded up to whole waves, so that shapes
    depend on K alone and a new cohort never compiles anew.

    Args:
      shards: V, whatever the devices, each of which runs V / devices of them one after
        the other; idle shards fill up the last device. None takes one per device.
      ids: [K] who they are: ties are broken by id and not by place.
    """
    count, shards = len(num_steps), shards or num_devices
    ties = np.arange(count) if ids is None else ids
    order = np.lexsort((ties, -num_steps))
    waves = -(-count // (shards * lanes))
    dealt = np.full((-(-shards // num_devices) * num_devices, waves * lanes), -1)
    if shards == 1:
        dealt[0, :count] = order
    else:
        _deal(dealt[:shards], order, num_steps)
    slots = dealt.reshape(-1, waves, lanes).astype(np.int32)
    steps = np.where(slots >= 0, np.take(num_steps, slots, mode="clip"), 0)
    longest = steps.max(axis=2).reshape(num_devices, -1).sum(axis=1)  # [A]
    return Plan(
        slots=slots,
        executed_steps=int(longest.sum()) * lanes,
        useful_steps=int(num_steps.sum()),
        imbalance=float(longest.max() / max(longest.mean(), 1e-9)),
    )


def _deal(dealt: np.ndarray, order: np.ndarray, num_steps: np.ndarray) -> None:
    """Fill `dealt` [V, places] in place, least loaded shard first."""
    places = dealt.shape[1]
    shards = [[] for _ in dealt]
    loads = [(0, 0, shard) for shard in range(len(dealt))]
    for client, steps in zip(order.tolist(), num_steps[order].tolist(), strict=True):
        load, taken, shard = loads[0]
        shards[shard].append(client)
        if taken + 1 < places:
            heapq.heapreplace(loads, (load + steps, taken + 1, shard))
        else:
            heapq.heappop(loads)
    for row, clients in zip(dealt, shards, strict=True):
        row[: len(clients)] = clients
