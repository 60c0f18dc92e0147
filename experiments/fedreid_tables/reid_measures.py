"""What is measured of a row, and where a row is found.

Pure functions of {case: {seed: {row: what `run_one` returns}}}, as run.py keeps it.
"""

from collections.abc import Callable

import numpy as np
from reid_cases import ALSO, CASES

Results = dict[str, dict]
BEST = 3  # rounds whose mean the paper reports


def runs_of(results: Results, case: str, row: str) -> list[dict]:
    """A row of every seed, [] unless all have it; of another case where ALSO says so.

    Args:
      row: its name, or "case/name" for a row of that case.
    """
    other, _, name = row.rpartition("/")
    also, shared = ALSO.get(case, ("", ()))
    place = other or (also if name in shared else case)
    seeds = results.get(place, {})
    if [*seeds] != [*results.get(case, {})]:
        return []
    is_known = bool(seeds) and all(name in rows for rows in seeds.values())
    return [rows[name] for rows in seeds.values()] if is_known else []


def rows_of(results: Results, case: str) -> list[str]:
    """Rows that every seed of a case has, then those that it shares."""
    names = (*CASES[case], *ALSO.get(case, ("", ()))[1])
    return [name for name in names if runs_of(results, case, name)]


# What is measured of a row of one seed; nan where it has no such number.


def last(row: dict, metric: str = "rank1") -> float:
    """After the last round: the one network, or the mean over clients' own."""
    found = row["generic"] or row["personalized"]
    return found.get(metric, np.nan)


def local(row: dict, metric: str = "rank1") -> float:
    """Mean over clients, each with the network that its next local training makes."""
    return row["local"].get(metric, np.nan)


def of_half(row: dict, *, is_small: bool) -> float:
    """The same over the half of the clients with the fewest or the most images."""
    values = np.array(row["of_client"].get("local", []))
    if not len(values):
        return np.nan
    order = np.argsort(row["clients"]["images"], kind="stable")
    half = len(values) // 2
    chosen = order[:half] if is_small else order[half:]
    return float(values[chosen].mean())


def small(row: dict) -> float:
    """`local` of the half of the clients with the fewest images."""
    return of_half(row, is_small=True)


def large(row: dict) -> float:
    """`local` of the half of the clients with the most images."""
    return of_half(row, is_small=False)


def peak(row: dict) -> float:
    """Mean over the three best rounds, which the paper reports."""
    curve = sorted(row["of_round"])
    return float(np.mean(curve[-BEST:])) if curve else np.nan


def late(row: dict) -> float:
    """Mean over the second half of the rounds."""
    curve = row["of_round"]
    return float(np.mean(curve[len(curve) // 2 :])) if curve else np.nan


def swing(row: dict) -> float:
    """Deviation of the second half of the rounds from a straight line through them.

    Growth from round to round does not count.

    >>> round(swing({"of_round": 4 * [0.0] + [0.1, 0.2, 0.3, 0.4]}), 3)
    0.0
    """
    curve = np.array(row["of_round"])[len(row["of_round"]) // 2 :]
    if len(curve) < 3:
        return np.nan
    number = np.arange(len(curve))
    line = np.polyval(np.polyfit(number, curve, 1), number)
    deviation = float(np.sqrt(np.mean((curve - line) ** 2)))
    return round(deviation, 9)  # equal seeds must not differ by rounding only


def values_of(results: Results, case: str, row: str, measure: Callable) -> np.ndarray:
    """[seeds], empty without the row."""
    return np.array([measure(run) for run in runs_of(results, case, row)])
