"""Which device trains which client when: longest processing time first, then waves.

Clients are dealt to devices by falling number of steps, each to the least loaded
device that has a place left (Graham 1969), and a device's clients, still by falling
steps, are cut into waves of L lanes: a wave runs as many steps as its longest client.
"""

import heapq
from typing import NamedTuple

import numpy as np


class Plan(NamedTuple):
    """Places of a cohort on A devices x W waves x L lanes."""

    slots: np.ndarray  # [A, W, L] int32 place in the cohort, -1 where idle
    executed_steps: int  # lanes x longest client, summed over waves and devices
    useful_steps: int  # sum of the clients' steps
    imbalance: float  # busiest device's wave steps over the mean device's, >= 1


def schedule(num_steps: np.ndarray, *, num_devices: int, lanes: int) -> Plan:
    """Deal clients with `num_steps` [K] to devices and waves.

    Every device has ceil(K / A) places, rounded up to whole waves, so that shapes
    depend on K alone and a new cohort never compiles anew.
    """
    count = len(num_steps)
    order = np.argsort(-num_steps, kind="stable")
    waves = -(-count // (num_devices * lanes))
    dealt = np.full((num_devices, waves * lanes), -1, np.int32)
    if num_devices == 1:
        dealt[0, :count] = order
    else:
        _deal(dealt, order, num_steps)
    slots = dealt.reshape(num_devices, waves, lanes)
    steps = np.where(slots >= 0, np.take(num_steps, slots, mode="clip"), 0)
    longest = steps.max(axis=2).sum(axis=1)  # [A]
    return Plan(
        slots=slots,
        executed_steps=int(longest.sum()) * lanes,
        useful_steps=int(num_steps.sum()),
        imbalance=float(longest.max() / max(longest.mean(), 1e-9)),
    )


def _deal(dealt: np.ndarray, order: np.ndarray, num_steps: np.ndarray) -> None:
    """Fill `dealt` [A, places] in place, least loaded device first."""
    loads = [(0, 0, device) for device in range(len(dealt))]
    for client in order:
        load, taken, device = heapq.heappop(loads)
        dealt[device, taken] = client
        if taken + 1 < dealt.shape[1]:
            cost = load + int(num_steps[client])
            heapq.heappush(loads, (cost, taken + 1, device))
