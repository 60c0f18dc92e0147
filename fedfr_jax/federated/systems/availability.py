"""Availability of clients: periodic windows of time.

Devices train when they are idle, charging and on a free network, which is at night
(Bonawitz et al. 2019, arXiv:1902.01046, section 9: four times as many as by day).
"""

import os
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Interval

from fedfr_jax.federated.systems.profiles import check_complete, read_lines
from fedfr_jax.ranges import NonNegative, Seed
from fedfr_jax.schema import checked

HOUR, DAY = 3600.0, 24 * 3600.0
COLUMNS = ("client", "from", "to")


class Availability(NamedTuple):
    """Periodic windows of N clients, at least one for each."""

    offsets: np.ndarray  # [N + 1] client i has windows offsets[i]:offsets[i + 1]
    start: np.ndarray  # [.] seconds
    length: np.ndarray  # [.] seconds
    period: float  # seconds after which the windows repeat

    def wait(self, time: float) -> np.ndarray:
        """Seconds [N] until each client is available, 0 if it is at `time`."""
        since = (time - self.start) % self.period
        until = np.where(since < self.length, 0.0, self.period - since)
        return np.minimum.reduceat(until, self.offsets[:-1])


@checked
def diurnal_availability(
    num_clients: int,
    *,
    hours: Annotated[float, Interval(ge=1e-3, le=24)] = 8.0,
    peak_hour: Annotated[float, Interval(ge=0, le=24)] = 2.0,
    spread_hours: NonNegative = 3.0,
    seed: Seed = 0,
) -> Availability:
    """Every client is available for `hours` each day, at about the same time.

    Args:
      hours: length of a client's window, in (0, 24].
      peak_hour: when most of them are there, in [0, 24).
      spread_hours: standard deviation of the windows' middles.
    """
    draws = np.random.default_rng((seed, 8)).normal(size=num_clients)
    middle = peak_hour + spread_hours * draws
    start = (middle - hours / 2) * HOUR % DAY
    length = np.full(num_clients, hours * HOUR)
    return Availability(np.arange(num_clients + 1), start, length, DAY)


def read_availability(path: str | os.PathLike, num_clients: int) -> Availability:
    """Read windows from a csv file with lines `client,from,to` in seconds.

    In any order; the trace repeats after the last `to`.
    """
    windows = []
    for line, (client, start, end) in read_lines(path, COLUMNS, num_clients):
        if not 0 <= start < end:
            raise ValueError(
                f"{path} must have 0 <= from < to, got {start} and {end} in line "
                f"{line}."
            )
        windows.append((client, start, end))
    client, start, end = np.array(windows, float).reshape(-1, 3).T
    counts = np.bincount(client.astype(np.int64), minlength=num_clients)
    check_complete(path, counts > 0)
    order = np.argsort(client, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return Availability(offsets, start[order], (end - start)[order], float(end.max()))
