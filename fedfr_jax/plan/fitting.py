"""The largest batch, number of classes and lanes that fit a device."""

import math
from collections.abc import Callable

TRIES = 4


def largest(memory_of: Callable[[int], float], now: int, unit: int, room: float) -> int:
    """The largest multiple of `unit` whose memory fits `room`; 0 where none does.

    Args:
      memory_of: number -> bytes, which grow with it at least about linearly; each call
        traces a program.
      now: a number from which, and from whose double, the growth is taken.
    """
    first, second = memory_of(now), memory_of(2 * now)
    each = (second - first) / now
    if each <= 0:
        return now if first <= room else 0
    found = _down(now + (room - first) / each, unit)
    for _ in range(TRIES):
        over = (memory_of(found) if found else 0.0) - room
        if over <= 0:
            break
        found = max(_down(found - over / each, unit), 0)
    return found


def _down(number: float, unit: int) -> int:
    return max(math.floor(number / unit), 0) * unit
