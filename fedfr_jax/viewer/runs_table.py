"""List of the runs in a folder: filtered, sorted, as a table or JSON."""

import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedfr_jax.schema import hint
from fedfr_jax.text import printable
from fedfr_jax.viewer.run_files import (
    RunFiles,
    Stamp,
    age_text,
    file_stamps,
    find_runs,
    flat_config,
    is_locked,
    is_run,
    last_numbers,
)

DAMAGED = "damaged"  # state of a run with a file that is not as it was written
COLUMNS = ("name", "state", "task", "stage", "round", "seconds", "age")


class Listing(NamedTuple):
    """Rows of runs, and one line for each file or run that cannot be read."""

    rows: list[dict[str, Any]]
    problems: list[str]


def list_runs(
    folder: pathlib.Path, words: Sequence[str] = (), metric: str = ""
) -> Listing:
    """List the runs in and below a folder that match all words, by name.

    Args:
      words: KEY=VALUE, or a part of the name.
      metric: to show, "evaluator/metric"; "" takes a run's first.
    """

    def read(path, name):
        run = RunFiles(path, name)
        row = run_row(run, metric)
        return row if all(_fits(run, row, word) for word in words) else None, run

    found, problems = each_run(folder, read)
    shown = [(row, run) for row, run in found if row]
    problems = [*problems, *(x for _, run in shown for x in run.problems)]
    return Listing([row for row, _ in shown], problems)


def each_run(folder: pathlib.Path, read: Callable) -> tuple[list, list[str]]:
    """([read(path, name) of each run in a folder], lines of those that raise)."""
    if not folder.is_dir():
        raise ValueError(f"{folder} must be a folder of runs, but does not exist.")
    results, problems = [], []
    for path in find_runs(folder):
        try:
            results.append(read(path, run_name(path, folder)))
        except Exception as error:  # one run does not hide the others
            problems.append(printable(f"{path}: not shown: {error}"))
    return results, problems


class RunList:
    """List of a folder's runs that reads a run again only when its files change."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._lock = threading.Lock()
        self._runs: dict[pathlib.Path, _KnownRun] = {}

    def read(self) -> Listing:
        """List the runs as they are now, by name."""
        with self._lock:
            found, problems = each_run(self._folder, self._read)
            self._runs = {run.path: run for run in found}
        rows = [run.row_now() for run in found]
        return Listing(rows, [*problems, *(x for run in found for x in run.problems)])

    def find(self, names: Sequence[str]) -> list[RunFiles]:
        """Open the named runs; a name that no run has is left out."""
        if not {*names} <= {run.row["name"] for run in self._runs.values()}:
            self.read()
        paths = {run.row["name"]: path for path, run in self._runs.items()}
        paths = {name: paths[name] for name in names if name in paths}
        return [RunFiles(path, name) for name, path in paths.items() if is_run(path)]

    def _read(self, path: pathlib.Path, name: str) -> "_KnownRun":
        stamps, known = file_stamps(path), self._runs.get(path)
        if known and known.stamps == stamps:
            return known
        run = RunFiles(path, name)
        row = run_row(run)
        settled = DAMAGED if run.is_damaged else run.settled
        return _KnownRun(path, row, settled, run.problems, stamps)


class _KnownRun(NamedTuple):
    path: pathlib.Path
    row: dict[str, Any]
    settled: str  # state if it is not locked
    problems: list[str]
    stamps: Mapping[str, Stamp | None]  # of its files, before they were read

    def row_now(self) -> dict[str, Any]:
        """The row with the state and age of now."""
        state = self.settled
        if state != DAMAGED and is_locked(self.path):
            state = "running"
        age = age_text(time.time() - self.row["changed"])
        return {**self.row, "state": state, "age": age}


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
    row = {
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
    return {**row, "state": DAMAGED} if run.is_damaged else row  # now all is read


def _fits(run: RunFiles, row: Mapping[str, Any], word: str) -> bool:
    key, is_pair, value = word.partition("=")
    if not is_pair:
        return word.lower() in run.name.lower()
    fields = {**flat_config(run.config), **{name: row[name] for name in COLUMNS}}
    return key in fields and str(fields[key]) == value


def fits_words(row: Mapping[str, Any], words: str) -> bool:
    """Whether a row has all words in its name, state, task or stage."""
    text = " ".join(row[name] for name in ("name", "state", "task", "stage")).lower()
    return all(word in text for word in words.lower().split())


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
