"""Footprint: the energy, CO2 and money that clients' rounds cost, of counted work.

A client spends

    joules_per_gflop * operations / 1e9 + joules_per_mb * bytes / 1e6

joules in a round: operations of convolutions and matrix products, and bytes down and
up, see `disclosure.count_work`. CO2 is energy times what the grid emits at the hour at
which the round ends; without simulated time it is the mean over the day. Energy and
bytes are paid for. Not counted are the server, evaluations, idle devices, and clients
that a round does not wait for: late ones, those beyond the first K of over-selection,
and in asynchronous runs those whose update is lost or too old.
"""

import os
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Interval

from fedfr_jax.federated.systems.devices import (
    GIGA,
    HOUR,
    Work,
    check_lines,
    read_numbers,
)
from fedfr_jax.ranges import NonNegative
from fedfr_jax.schema import checked

MEGA, KWH = 1e6, 3.6e6  # bytes of a megabyte; joules of a kilowatt-hour
HOURS = 24
DEVICE = ("client", "joules_per_gflop", "joules_per_mb", "price_per_kwh")
GRID = ("hour", "grams_per_kwh")


class Footprint(NamedTuple):
    """What work costs; numbers of all clients, or arrays [N]; see `footprint`."""

    joules_per_gflop: float | np.ndarray
    joules_per_mb: float | np.ndarray
    price_per_kwh: float | np.ndarray
    price_per_gb: float
    grams_per_kwh: np.ndarray  # [24] of CO2, by hour of the day
    start_hour: float = 0.0  # of the first round


class Costs(NamedTuple):
    """Costs of the K clients of a round."""

    joules: np.ndarray  # [K]
    co2: np.ndarray  # [K] kg
    price: np.ndarray  # [K]

    @property
    def each(self) -> dict[str, np.ndarray]:
        """Costs [K] of each client, as they stand in a run's log."""
        grams = 1e3 * self.co2
        return {
            "joules": self.joules,
            "co2_grams": grams,
            "client_price": self.price,
        }

    @property
    def total(self) -> dict[str, float]:
        """Costs of all clients together, as they stand in a run's log."""
        kwh = float(self.joules.sum()) / KWH
        return {
            "energy_kwh": kwh,
            "co2_kg": float(self.co2.sum()),
            "price": float(self.price.sum()),
        }


@checked
def footprint(
    num_clients: int,
    *,
    joules_per_gflop: NonNegative = 0.23,
    joules_per_mb: NonNegative = 6.75,
    price_per_kwh: NonNegative = 0.16,
    price_per_gb: NonNegative = 0.0,
    grams_per_kwh: NonNegative = 436.0,
    grid: str | None = None,
    devices: str | None = None,
    start_hour: Annotated[float, Interval(ge=0, le=24)] = 0.0,
) -> Footprint:
    """What the work of N clients costs.

    Args:
      joules_per_gflop: energy of 1e9 operations. Default: NVIDIA's data sheet of the
        Jetson TX2 (15 W, 256 cores x 2 x 1.3 GHz), of which training reaches a tenth.
      joules_per_mb: energy of 1e6 bytes in the network. Default: 0.06 kWh per GB in
        2015, halved every two years (Aslan et al. 2018, doi:10.1111/jiec.12630), taken
        on to 2025; fixed lines, mobile networks need several times as much.
      price_per_kwh: default: US dollars, homes in 2023 (EIA, Electric Power Annual).
      price_per_gb: of 1e9 bytes; 0 is a flat rate.
      grams_per_kwh: of CO2. Default: the world in 2022 (Ember, Global Electricity
        Review 2023).
      grid: csv file of 24 lines `hour,grams_per_kwh`, hours 0 to 23, in its place.
      devices: csv file of lines `client,joules_per_gflop,joules_per_mb,price_per_kwh`
        for each client, numbered from 0, in place of the three numbers.
      start_hour: hour of the day at which the first round begins.
    """
    compute, network, kwh = joules_per_gflop, joules_per_mb, price_per_kwh
    if devices is not None:
        compute, network, kwh = _read_positive(devices, DEVICE, num_clients)
    hours = np.full(HOURS, grams_per_kwh)
    if grid is not None:
        (hours,) = _read_positive(grid, GRID, HOURS)
    return Footprint(compute, network, kwh, price_per_gb, hours, start_hour)


def _read_positive(path: str | os.PathLike, columns, count: int) -> np.ndarray:
    """Columns [c, count] of a csv file with one line for each of `count`."""
    table, numbers = read_numbers(path, columns, count)
    check_lines(path, numbers, count, max_lines=1, what=columns[0])
    values = table[np.argsort(numbers)].T
    if values.min() < 0:
        raise ValueError(
            f"{path} must have numbers of at least 0, got {values.min():g}."
        )
    return values


def costs_of(
    prices: Footprint,
    work: Work,
    ids: np.ndarray,
    steps: np.ndarray,
    seconds: float | None,
) -> Costs:
    """Costs of clients `ids` [K] that take `steps` [K].

    Args:
      seconds: since the first round began, simulated; None: time is not simulated.
    """
    of_client = lambda x: x[ids] if np.ndim(x) else x
    gigaflops = (work.flops + steps * float(work.flops_per_step)) / GIGA
    num_bytes = work.download + work.upload
    joules = of_client(prices.joules_per_gflop) * gigaflops
    joules = joules + of_client(prices.joules_per_mb) * num_bytes / MEGA
    kwh, grams = joules / KWH, prices.grams_per_kwh.mean()
    if seconds is not None:
        hour = prices.start_hour + seconds / HOUR
        grams = prices.grams_per_kwh[int(hour % HOURS)]
    price = of_client(prices.price_per_kwh) * kwh
    price = price + prices.price_per_gb * num_bytes / GIGA
    return Costs(joules, kwh * grams / 1e3, price)
