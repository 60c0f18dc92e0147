"""What the rows say: tables, and which of the paper's claims hold.

Pure functions of {case: {seed: {row: what `run_one` returns}}}, as run.py keeps it.
Numbers of the paper are those of arXiv:2205.12144 (rank-1 in percent).
"""

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from orderings import made, p_value, spread, verdict
from reid_cases import ALSO, CAMERA, CASES, CENTRE, IDENTITY, PARTS

Results = dict[str, dict]
BEST = 3  # rounds whose mean the paper reports
SCENARIOS = (CAMERA, IDENTITY, PARTS)


def read(path: pathlib.Path) -> Results:
    """Results by case, in the order of CASES."""
    found = json.loads(path.read_text())
    return {case: found[case]["seeds"] for case in CASES if case in found}


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
    found = row["generic"] or row["personalised"]
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


def swing(row: dict) -> float:
    """Mean size of the change from one round to the next, in the second half.

    >>> round(swing({"of_round": [0.0, 0.0, 0.5, 0.4, 0.6, 0.6]}), 3)
    0.1
    """
    curve = np.array(row["of_round"])[len(row["of_round"]) // 2 :]
    return float(np.abs(np.diff(curve)).mean()) if len(curve) > 1 else np.nan


class Claim(NamedTuple):
    """That one measure of a row is above a measure of another."""

    text: str
    paper: str  # its numbers
    cases: tuple[str, ...]
    above: tuple[Callable, str]  # (measure, row)
    below: tuple[Callable, str]


CLAIMS = (
    Claim(
        "KD removes the fluctuation",
        "without it, Market: the last of 30 tests 55, best 84.6",
        SCENARIOS,
        (swing, "fedpav"),
        (swing, "kd"),
    ),
    Claim(
        "KD + CDW removes the fluctuation",
        "Market: the last of 30 tests 87, best 87.2",
        SCENARIOS,
        (swing, "fedpav"),
        (swing, "kd_cdw"),
    ),
    Claim(
        "KD + CDW ends above FedPav",
        "last tests: 41, 75, 87, 78 against 18, 40, 55, 48",
        SCENARIOS,
        (last, "kd_cdw"),
        (last, "fedpav"),
    ),
    Claim(
        "KD lowers the peak",
        "38.2, 73.3, 83.8, 79.8 against 41.7, 75.6, 84.6, 83.9",
        SCENARIOS,
        (peak, "fedpav"),
        (peak, "kd"),
    ),
    Claim(
        "KD + CDW raises the peak",
        "42.1, 76.3, 87.2, 79.4 against 41.7, 75.6, 84.6, 83.9",
        SCENARIOS,
        (peak, "kd_cdw"),
        (peak, "fedpav"),
    ),
    Claim(
        "the centre is above FedPav",
        "Market 88.9 against 61.1 by camera, 85.7 by identity; 91.7 against 83.4",
        SCENARIOS,
        (last, "merged"),
        (last, "fedpav"),
    ),
    Claim(
        "local models are above the global one",
        "on all nine sets, by 0.2 to 13.0",
        SCENARIOS,
        (local, "fedpav"),
        (last, "fedpav"),
    ),
    Claim(
        "federation pays small clients",
        "+11.6 to +32.7 on four sets",
        (PARTS,),
        (small, "fedpav"),
        (small, "standalone"),
    ),
    Claim(
        "federation costs large clients",
        "-1.3 to -9.8 on five sets",
        (PARTS,),
        (large, "standalone"),
        (large, "fedpav"),
    ),
    Claim(
        "CDW pays large clients too",
        "+1.2 to +7.3 on five sets",
        (PARTS,),
        (large, "cdw"),
        (large, "standalone"),
    ),
    Claim(
        "CDW is above FedPav, local models",
        "mean gain over standalone 11.3 against 6.8",
        SCENARIOS,
        (local, "cdw"),
        (local, "fedpav"),
    ),
    Claim(
        "FedProx is above FedPav, local models",
        "7.9 against 6.8",
        SCENARIOS,
        (local, "fedprox"),
        (local, "fedpav"),
    ),
    Claim(
        "clustering pays large clients",
        "mean gain over standalone 2.2 against -4.6",
        (PARTS,),
        (large, "clustering"),
        (large, "fedpav"),
    ),
    Claim(
        "clustering costs small clients",
        "7.1 against 21.0",
        (PARTS,),
        (small, "fedpav"),
        (small, "clustering"),
    ),
    Claim(
        "by identity is easier than by camera",
        "Market 85.7 against 61.1",
        (IDENTITY,),
        (last, "fedpav"),
        (last, f"{CAMERA}/fedpav"),
    ),
    Claim(
        "the first client's statistics swing more than the mean's",
        "not asked",
        (PARTS,),
        (swing, "fedpav_first"),
        (swing, "fedpav"),
    ),
    Claim(
        "KD calms FedPav with the first client's statistics",
        "as released, where KD renews them too",
        (PARTS,),
        (swing, "fedpav_first"),
        (swing, "kd_first"),
    ),
    Claim(
        "averaging statistics calms more than KD",
        "not asked",
        (PARTS,),
        (swing, "kd_first"),
        (swing, "fedpav"),
    ),
    Claim(
        "clients' own statistics swing less than the mean's",
        "not asked",
        (PARTS,),
        (swing, "fedpav"),
        (swing, "fedpav_local"),
    ),
    Claim(
        "a strong centre is above the plain one",
        "fast-reid 94.4 against 88.9",
        (CENTRE,),
        (last, "merged_strong"),
        (last, "merged"),
    ),
)


def values_of(results: Results, case: str, row: str, measure: Callable) -> np.ndarray:
    """[seeds], empty without the row."""
    return np.array([measure(run) for run in runs_of(results, case, row)])


def lines(results: Results) -> Iterator[tuple[Claim, str, np.ndarray]]:
    """(claim, case, difference [seeds]) as far as there are rows to tell."""
    for claim in CLAIMS:
        for case in claim.cases:
            sides = (claim.above, claim.below)
            pair = [values_of(results, case, row, of) for of, row in sides]
            if all(len(values) for values in pair):
                difference = pair[0] - pair[1]
                if np.isfinite(difference).all():
                    yield claim, case, difference


def claims_table(results: Results) -> str:
    """Markdown: a line per claim and case."""
    text = [
        "| claim | the paper | case | difference in points, each seed | p | holds |",
        "|---|---|---|---|---|---|",
    ]
    for claim, case, difference in lines(results):
        shown = ", ".join(f"{100 * d:+.1f}" for d in difference)
        found = f"{p_value(difference):.3f} | {verdict(difference)}"
        text.append(f"| {claim.text} | {claim.paper} | {case} | {shown} | {found} |")
    return "\n".join(text)


COLUMNS: dict[str, Callable] = {
    "global rank-1": last,
    "mAP": lambda row: last(row, "map"),
    "best three": peak,
    "swing": swing,
    "local rank-1": local,
    "mAP ": lambda row: local(row, "map"),
    "smaller half": small,
    "larger half": large,
}


def case_table(results: Results, case: str) -> str:
    """Markdown: a line per row, in percent."""
    heads = ["row", *COLUMNS, "core s"]
    text = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows_of(results, case):
        values = [values_of(results, case, row, of) for of in COLUMNS.values()]
        cells = [spread(x) if np.isfinite(x).all() else "" for x in values]
        runs = runs_of(results, case, row)
        cost = np.mean([run["cost"]["core_seconds"] for run in runs])
        text.append(f"| {row} | " + " | ".join(cells) + f" | {cost:.0f} |")
    return "\n".join(text)


def text(results: Results) -> str:
    """What stands between the markers of README.md."""
    stamps = {made(seeds) for seeds in results.values()}
    stamps = "; ".join(sorted({stamp for x in stamps for stamp in x.split("; ")}))
    tables = [f"### {case}\n\n{case_table(results, case)}" for case in results]
    return "\n\n".join([stamps, claims_table(results), *tables])
