"""Client devices: how fast they compute and communicate, and when they are available.

A round of a client lasts

    download / bandwidth down + operations / speed + upload / bandwidth up

seconds, of counted bytes and operations: nothing is measured, so that a simulated
second is the same on every machine. The spread of speeds stands for everything else on
a device (other programs, retries).

Devices train when they are idle, charging and on a free network, which is at night
(Bonawitz et al. 2019, arXiv:1902.01046, section 9: four times as many as by day).
"""

import os
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Interval

from fedfr_jax.files import read_csv
from fedfr_jax.ranges import NonNegative, Positive, Seed
from fedfr_jax.schema import checked
from fedfr_jax.text import parse_number

GIGA, MEGABIT = 1e9, 1e6 / 8  # operations; bytes
HOUR, DAY = 3600.0, 24 * 3600.0
SPEEDS = ("client", "gflops", "download_mbps", "upload_mbps")
WINDOWS = ("client", "from", "to")


class Work(NamedTuple):
    """Work of one client in a round, see `disclosure.count_work`."""

    download: int  # bytes
    upload: int  # bytes
    flops: int  # operations outside of the local steps
    flops_per_step: int


class Profiles(NamedTuple):
    """Speeds of N clients' devices."""

    flops: np.ndarray  # [N] operations per second
    download: np.ndarray  # [N] bytes per second
    upload: np.ndarray  # [N] bytes per second

    @property
    def num_clients(self) -> int:
        """Number of clients, N."""
        return len(self.flops)


@checked
def log_normal_profiles(
    num_clients: int,
    *,
    gflops: Positive = 10.0,
    download_mbps: Positive = 20.0,
    upload_mbps: Positive = 5.0,
    speed_sigma: NonNegative = 1.0,
    bandwidth_sigma: NonNegative = 1.0,
    seed: Seed = 0,
) -> Profiles:
    """Sample profiles from log-normal distributions, independent for the three speeds.

    Args:
      gflops, download_mbps, upload_mbps: medians, in 1e9 operations and 1e6 bits per
        second.
      speed_sigma, bandwidth_sigma: standard deviations of the natural logarithms; with
        1, two thirds of the clients are within a factor of 2.7 of the median.
    """
    draws = np.random.default_rng((seed, 7)).normal(size=(3, num_clients))
    speed = np.exp(speed_sigma * draws[0])
    down, up = np.exp(bandwidth_sigma * draws[1:])
    return Profiles(
        flops=gflops * GIGA * speed,
        download=download_mbps * MEGABIT * down,
        upload=upload_mbps * MEGABIT * up,
    )


def read_profiles(path: str | os.PathLike, num_clients: int) -> Profiles:
    """Read a csv file of lines `client,gflops,download_mbps,upload_mbps`.

    One for each client, numbered from 0, in any order.
    """
    table, clients = read_numbers(path, SPEEDS, num_clients)
    check_lines(path, clients, num_clients, max_lines=1)
    speeds = table[np.argsort(clients)].T
    if not (speeds > 0).all():
        raise ValueError(f"{path} must have positive numbers, got {speeds.min()}.")
    gflops, download, upload = speeds
    return Profiles(gflops * GIGA, download * MEGABIT, upload * MEGABIT)


def read_numbers(
    path: str | os.PathLike, columns: Sequence[str], num_clients: int
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers [n, c] and clients [n] of a csv file with these columns, client first."""
    table, clients = [], []
    for line, (client, *texts) in read_csv(path, columns).items():
        try:
            clients.append(int(client))
            table.append([parse_number(text) for text in texts])
            is_valid = 0 <= clients[-1] < num_clients and np.isfinite(table[-1]).all()
        except ValueError:
            is_valid = False
        if not is_valid:
            raise ValueError(
                f"{path} must have {columns[0]}s in [0, {num_clients}) and numbers, "
                f"got {[client, *texts]} in line {line}."
            )
    shape = len(table), len(columns) - 1
    return np.array(table, float).reshape(shape), np.array(clients, np.int64)


def check_lines(
    path,
    clients: np.ndarray,
    num_clients: int,
    max_lines: int,
    what: str = "client",
) -> None:
    """Raise ValueError for the first of N clients with no line, or too many."""
    counts = np.bincount(clients, minlength=num_clients)
    is_wrong = (counts == 0) | (counts > max_lines)
    if is_wrong.any():
        client = int(is_wrong.argmax())
        raise ValueError(
            f"{path} must have a line for each of the {num_clients} {what}s, got "
            f"{counts[client]} for {what} {client}."
        )


def seconds_of(
    profiles: Profiles, work: Work, ids: np.ndarray, steps: np.ndarray
) -> np.ndarray:
    """Seconds [K] from a client's download to the arrival of its update."""
    per_step = work.flops_per_step / profiles.flops[ids]
    return seconds_without_steps(profiles, work, ids) + steps * per_step


def seconds_without_steps(
    profiles: Profiles, work: Work, ids: np.ndarray
) -> np.ndarray:
    """Seconds [K] of communication and of computation that is done once per round."""
    down = work.download / profiles.download[ids]
    up = work.upload / profiles.upload[ids]
    return down + work.flops / profiles.flops[ids] + up


def steps_before(
    deadline: float, profiles: Profiles, work: Work, ids: np.ndarray
) -> np.ndarray:
    """Largest steps [K] for which a client's update arrives before the deadline."""
    left = deadline - seconds_without_steps(profiles, work, ids)
    per_step = work.flops_per_step / profiles.flops[ids]
    steps = np.floor(left / np.maximum(per_step, 1e-30))
    return np.clip(steps, 0, 2**31 - 1).astype(np.int64)


class Availability(NamedTuple):
    """Periodic windows of N clients, at least one for each."""

    offsets: np.ndarray  # [N + 1] client i has windows offsets[i]:offsets[i + 1]
    start: np.ndarray  # [.] seconds
    length: np.ndarray  # [.] seconds
    period: float | np.ndarray  # [] or [.] seconds after which the windows repeat

    @property
    def num_clients(self) -> int:
        """Number of clients, N."""
        return len(self.offsets) - 1

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
    table, clients = read_numbers(path, WINDOWS, num_clients)
    check_lines(path, clients, num_clients, max_lines=len(clients))
    start, end = table[np.argsort(clients, kind="stable")].T
    is_wrong = (start < 0) | (start >= end)
    if is_wrong.any():
        i = is_wrong.argmax()
        raise ValueError(
            f"{path} must have 0 <= from < to, got {start[i]:g} and {end[i]:g}."
        )
    counts = np.bincount(clients, minlength=num_clients)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return Availability(offsets, start, end - start, float(end.max()))
