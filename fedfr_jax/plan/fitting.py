"""The largest number of something whose memory fits."""

from collections.abc import Callable

TRIES, NEAR = 8, 0.02


def largest(memory_of: Callable[[int], float], now: int, unit: int, room: float) -> int:
    """About the largest multiple of `unit` whose memory fits; 0 where none does.

    Args:
      memory_of: number -> bytes, rising and convex, as the largest of several needs is;
        each call traces a program.
      now: a number from which, and from whose double, the growth is taken.
      room: bytes.
    """
    low, least = now, memory_of(now)
    if least > room:
        low, least = unit, memory_of(unit)
        if low >= now or least > room:
            return 0
    twice = memory_of(2 * low)
    each = (twice - least) / low
    if each <= 0:
        return low
    # The growth at its start is too small, so this is too many, or just fits.
    high = _down(low + (room - least) / each, unit)
    most = memory_of(high) if high > low else least
    for _ in range(TRIES):
        if most <= room:
            return max(high, low)
        # A chord lies above the curve: where it fits, the curve does.
        share = (room - least) / (most - least)
        middle = max(_down(low + share * (high - low), unit), low)
        if middle - low < NEAR * low:
            middle = _down((low + high) / 2, unit)
        if middle <= low or high - low < NEAR * low:
            break
        found = memory_of(middle)
        if found <= room:
            low, least = middle, found
        else:
            high, most = middle, found
    return low


def _down(number: float, unit: int) -> int:
    return int(number // unit) * unit
