"""The table of a sweep: results.jsonl and results.csv, a row per run."""

import csv
import io
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from fedfr_jax.json_files import read_json_lines
from fedfr_jax.runs.locks import lock_to_write
from fedfr_jax.runs.sinks import write_text

FILE = "results.jsonl"
MARK = "sweep of fedfr_jax\n"  # what the lock of a sweep's folder says


def read(folder: pathlib.Path) -> dict[str, dict]:
    """{run: its row} of the table in `folder`, if there is one.

    Raises:
      ValueError: naming the line, for one that is no row.
    """
    path = folder / FILE
    rows = read_json_lines(path, "run") if path.exists() else []
    return {row["run"]: row for row in rows}


def add(folder: pathlib.Path, row: Mapping[str, Any]) -> None:
    """Write a run's row beside those that this and other sweeps have written."""
    with lock_to_write(folder, MARK, waits=True):
        write(folder, list((read(folder) | {row["run"]: row}).values()))


def write(folder: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write both files, each whole or not at all; numbers that are not finite as null.

    Raises:
      OSError: the disk is full or the folder cannot be written; older files stay.
    """
    rows = [{key: _finite(value) for key, value in row.items()} for row in rows]
    lines = [json.dumps(row, allow_nan=False, default=list) for row in rows]
    write_text(folder / FILE, "".join(line + "\n" for line in lines))
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_text(folder / "results.csv", text.getvalue())


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def over_seeds(rows: Sequence[tuple[Mapping, Mapping]]) -> dict[str, dict]:
    """A sweep as a summary for `result_table`: a method is a setting without its seed,
    or a stage of it where a run has several.

    Args:
      rows: (changes, row) of each run; rows with an error are left out.

    Returns:
      {"stage, setting": {evaluator: {metric: one value per seed}}}.
    """
    found = {}
    for changes, row in rows:
        metrics = [key for key in row if key.count("/") == 2]
        if not metrics or "error" in row:
            continue
        own = [f"{k.rpartition('.')[2]}={v}" for k, v in changes.items() if k != "seed"]
        is_one = len({key.partition("/")[0] for key in metrics}) == 1
        for key in metrics:
            stage, evaluator, metric = key.split("/")
            name = ", ".join(own if is_one and own else [stage, *own])
            setting = found.setdefault(name, {})
            setting.setdefault(evaluator, {}).setdefault(metric, []).append(row[key])
    return found


def metrics_of(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """{"stage/evaluator/metric": number} of a run's summary."""
    return {
        f"{stage}/{evaluator}/{metric}": value
        for stage, found in summary["methods"].items()
        for evaluator, metrics in found.items()
        for metric, value in metrics.items()
        if isinstance(value, int | float | None)
    }
