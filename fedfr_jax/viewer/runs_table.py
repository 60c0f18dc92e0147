"""List of the runs in a folder: filtered, sorted, as a table or JSON."""

import pathlib
import time
from collections.abc import Sequence
from typing import Any

from fedfr_jax.schema import hint
from fedfr_jax.viewer.run_files import (
    RunFiles,
    age_text,
    find_runs,
    flat_config,
    last_numbers,
    read_run,
)

COLUMNS = ("name", "state", "task", "stage", "round", "seconds", "age")


def read_runs(folder: pathlib.Path) -> list[RunFiles]:
    """Read all runs in and below a folder, by name."""
    if not folder.is_dir():
        raise ValueError(f"{folder} must be a folder of runs, but does not exist.")
    paths = find_runs(folder)
    return [read_run(path, name=run_name(path, folder)) for path in paths]


def run_name(path: pathlib.Path, folder: pathlib.Path) -> str:
    """A run's path below a folder; its own name if it is the folder."""
    return path.name if path == folder else path.relative_to(folder).as_posix()


def run_row(run: RunFiles, metric: str = "") -> dict[str, Any]:
    """Row of the list for a run, with one metric: "evaluator/metric", or the first."""
    stages = list(run.stages.values())
    last = stages[-1] if stages else None
    rounds = run.config.get("federation", {}).get("rounds")
    numbers = last_numbers(run)
    metric_name = metric or next(iter(numbers), "")
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": run.state,
        "task": run.config.get("task", ""),
        "stage": last.name if last else "",
        "round": last.last_round if last else 0,
        "rounds": rounds if last and last.name != "pretrained" else None,
        "metric": metric_name,
        "metric_value": numbers.get(metric_name),
        "metrics": numbers,
        "seconds": run.seconds,
        "changed": run.changed,
        "age": age_text(time.time() - run.changed),
        "version": run.version,
    }


def filter_runs(runs: Sequence[RunFiles], terms: Sequence[str]) -> list[RunFiles]:
    """Keep the runs that match all words: KEY=VALUE, or part of the name."""
    return [run for run in runs if all(_fits(run, term) for term in terms)]


def _fits(run: RunFiles, term: str) -> bool:
    key, is_pair, value = term.partition("=")
    if not is_pair:
        return term.lower() in run.name.lower()
    row = {name: run_row(run)[name] for name in COLUMNS}
    fields = {**flat_config(run.config), **row}
    return key in fields and str(fields[key]) == value


def sort_rows(rows: list[dict], key: str) -> list[dict]:
    """Sort rows by a column or metric, newest or largest first; text from A to Z."""
    columns = [*COLUMNS, *dict.fromkeys(m for row in rows for m in row["metrics"])]
    if key not in columns:
        raise ValueError(
            f"--sort must be one of {columns}, got {key!r}{hint(key, columns)}."
        )
    if key == "age":
        return sorted(rows, key=lambda row: -row["changed"])
    value = lambda row: row["metrics"].get(key, row.get(key))
    if any(isinstance(value(row), str) for row in rows):
        return sorted(rows, key=lambda row: str(value(row) or ""))
    return sorted(rows, key=lambda row: (value(row) is None, -(value(row) or 0)))
