"""What the rows say: a table of claims, and one of rows for every case."""

from collections.abc import Callable

import numpy as np
from orderings import made, spread
from reid_claims import claims_table, lines
from reid_measures import (
    Results,
    large,
    last,
    local,
    peak,
    rows_of,
    runs_of,
    small,
    swing,
    values_of,
)

COLUMNS: dict[str, Callable] = {
    "global rank-1": last,
    "mAP": lambda row: last(row, "mAP"),
    "best three": peak,
    "swing": swing,
    "local rank-1": local,
    "mAP ": lambda row: local(row, "mAP"),
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
    """What stands between the markers of RESULTS.md."""
    stamps = {made(seeds) for seeds in results.values()}
    stamps = "; ".join(sorted({stamp for x in stamps for stamp in x.split("; ")}))
    tables = [f"### {case}\n\n{case_table(results, case)}" for case in results]
    return "\n\n".join([stamps, claims_table(results), chance(results), *tables])


def chance(results: Results) -> str:
    """How many claims would hold or fail if no row differed from another."""
    count = sum(1 for _ in lines(results))
    return (
        f"{count} tests without a correction: some {0.05 * count:.0f} of them would "
        "say yes or no if nothing differed."
    )
