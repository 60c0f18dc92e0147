"""The table of every set: a line per method, in the order of clients' own accuracy.

Pure functions of {set: {seed: {row: {evaluator: {metric: value}}}}}, as run.py keeps
it.
"""

from collections.abc import Sequence

import numpy as np
from orderings import made, spread

ROUNDS = "rounds_to_"  # the target follows
Runs = dict[str, dict]


def values_of(runs: Runs, row: str, judged: str, metric: str) -> list[float]:
    """A metric in every seed that has it."""
    found = [rows.get(row, {}).get(judged, {}).get(metric) for rows in runs.values()]
    return [value for value in found if value is not None]


def percent(values: Sequence[float]) -> str:
    """Mean and deviation over seeds, or a dash."""
    return spread(np.array(values)) if values else "-"


def mean(values: Sequence[float], seeds: int, digits: int = 0) -> str:
    """Mean over seeds; a dash where one has none."""
    return f"{np.mean(values):.{digits}f}" if len(values) == seeds else "-"


def all_rows(runs: Runs) -> list[str]:
    """Every row of any seed."""
    return sorted({row for rows in runs.values() for row in rows})


def target_of(runs: Runs) -> str:
    """The accuracy whose first round is named, as the metric has it."""
    every = (x for rows in runs.values() for row in rows.values() for x in row.values())
    metrics = {name for x in every if isinstance(x, dict) for name in x}
    return next((x for x in sorted(metrics) if x.startswith(ROUNDS)), ROUNDS)


def table(runs: Runs) -> str:
    """Markdown: a line per row, over the seeds that have it, with their number.

    The rounds are of the one network; where there is none, of the clients' own.
    """
    target = target_of(runs)
    goal = f"{100 * float(target.removeprefix(ROUNDS) or 0):g}"
    text = [
        "| row | seeds | one network, % | own networks, % | worst decile | after an "
        f"epoch of its own | rounds to {goal} % | MB up | MB down | MB in all |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    seeds = {row: [x[row] for x in runs.values() if row in x] for row in all_rows(runs)}
    is_over = {row: any("diverged" in x for x in found) for row, found in seeds.items()}
    own = {
        row: values_of(runs, row, "personalized", "accuracy")
        for row in seeds
        if not is_over[row]
    }
    for row in sorted(own, key=lambda row: (-np.mean(own[row]), row)):
        one = values_of(runs, row, "generic", "accuracy")
        judged = "generic" if one else "personalized"
        cells = [
            f"{len(seeds[row])}",
            percent(one),
            percent(own[row]),
            percent(values_of(runs, row, "personalized", "accuracy_worst_decile")),
            percent(values_of(runs, row, "finetuned", "accuracy")),
            mean(values_of(runs, row, judged, target), len(seeds[row])),
            *(
                mean(
                    values_of(runs, row, "communication", sent), len(seeds[row]), digits
                )
                for sent, digits in (
                    ("upload_mb", 2),
                    ("download_mb", 2),
                    ("total_mb", 0),
                )
            ),
        ]
        text.append(f"| {row} | {' | '.join(cells)} |")
    for row in filter(is_over.get, seeds):
        text.append(f"| {row} | {len(seeds[row])} | diverged | | | | | | | |")
    return "\n".join(text)


def text(results: dict[str, Runs]) -> str:
    """What stands between the markers of RESULTS.md."""
    parts = [
        f"### {name}\n\n{made(runs)}\n\n{table(runs)}" for name, runs in results.items()
    ]
    return "\n\n".join(parts)
