"""The largest number of something whose memory fits."""

from collections.abc import Callable

TRIES, NEAR = 8, 0.02


def largest(memory_of: Callable[[int], float], now: int, unit: int, room: float) -> int:
    """About the largest multiple of `unit` whose memory fits; 0 where none does.

    Args:
      memory_of: number -> bytes, rising and about convex, as the largest of several
        needs is; each call traces a program.
      unit: of the answer; where memory rises in stairs, the length of one.
      now: a number from which, and from whose double, the growth is taken.
      room: bytes.
    """
    low, least = now, memory_of(now)
    if least > room:
        low, least = unit, memory_of(unit)
        if low >= now or least > room:
            return 0
    end = -(-low // unit) * unit
    if end > low and (most := memory_of(end)) <= room:
        low, least = end, most
    twice = memory_of(2 * low)
    each = (twice - least) / low
    if each <= 0:
        return low
    # The growth at its start is too small, so this is too many, or just fits.
    high = _down(low + (room - least) / each, unit)
    most = memory_of(high) if high > low else least
    is_above = False  # where a chord ended: a hair's breadth above the room, on stairs
    for _ in range(TRIES):
        if most <= room:
            return max(high, low)
        # A chord lies above the curve: where it fits, the curve does.
        share = (room - least) / (most - least)
        middle = max(_down(low + share * (high - low), unit), low)
        if is_above or middle - low < NEAR * low:
            near = (1 - NEAR) * high if is_above else low
            middle = _down(max((low + high) / 2, near), unit)
        if middle <= low or high - low < NEAR * low:
            break
        found = memory_of(middle)
        is_above = found > room
        if is_above:
            high, most = middle, found
        else:
            low, least = middle, found
    return low


def _down(number: float, unit: int) -> int:
    return int(number // unit) * unit
