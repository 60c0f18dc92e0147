"""Files of run directories, read without JAX and in any state of the run.

A run is not trusted. `Files` alone reads its files: regular files in real folders,
not links, pipes or devices, of the types in `records`. A file that does not fit is left
out and named in one line.
"""

import contextlib
import functools
import itertools
import os
import pathlib
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from fedfr_jax import manifest
from fedfr_jax.files import read_regular
from fedfr_jax.json_files import broken_rule
from fedfr_jax.runs import locks, records
from fedfr_jax.runs.buckets import RUNNING
from fedfr_jax.schema import hint
from fedfr_jax.text import flat_config, printable

CONFIG, SUMMARY, METRICS = "config.json", "summary.json", "metrics.jsonl"
EVALUATION, PARTITION = "evaluation.json", "partition.json"
MAX_DEPTH = 4  # folders below the one whose runs are listed
DAMAGED = "damaged"  # state of a run with a file that is not as it was written
SKIPPED = ("checkpoints", "store", "tensorboard", "pictures")
LARGEST = 2**27  # bytes of a file that is read whole


class Stamp(NamedTuple):
    """What changes when a file does."""

    nanoseconds: int  # since the epoch, of the last write
    size: int
    inode: int


class Files:
    """Reads the files of one run.

    Attributes:
      folders: names of the folders in the run; links are none.
      is_damaged: whether a file that was read is not as its folder's manifest says.
    """

    def __init__(self, folder: pathlib.Path):
        """Look into the folder of a run."""
        self.folder = folder
        self.is_damaged = False
        self._problems: dict[str, str] = {}
        self._damaged: dict[str, set[int]] = {}
        self.folders = folder_names(folder)

    def stamp(self, name: str) -> Stamp | None:
        """Stamp of a file; None if it is missing or no regular file."""
        return file_stamp(f"{self.folder}/{name}")

    def read(self, name: str) -> bytes | None:
        """Read a file of the run, or of a folder in it; None if it cannot be read."""
        parent, _, _ = name.rpartition("/")
        if parent and parent not in self.folders:
            return None
        path = f"{self.folder}/{name}"
        try:
            return manifest.read_bytes(path, lambda x: read_regular(x, LARGEST))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._problems[name] = f": {error.strerror}"
        except ValueError as error:
            self.is_damaged = True
            listed = f"{parent}/{manifest.FILE}".removeprefix("/")
            if str(error).startswith(f"{self.folder}/{listed} "):
                name = listed  # once, whichever files it covers
            text = str(error).removeprefix(f"{self.folder}/{name} ").rstrip(".")
            self._problems[name] = f": {text}"
        return None

    def record(self, name: str, kind: TypeAdapter) -> Any:
        """Read a JSON file of a type of `records`; {} if it is not there or of none."""
        text = self.read(name)
        try:
            return {} if text is None else kind.validate_json(text)
        except ValidationError as error:
            self._problems[name] = f": {broken_rule(error)}"
            return {}

    def lines(self, name: str) -> list[bytes]:
        """Read the lines of a log that are finished."""
        return (self.read(name) or b"").split(b"\n")[:-1]

    def row(self, name: str, lines: Sequence[bytes], index: int) -> records.Row | None:
        """Parse a line of a log; None if it is blank or damaged."""
        try:
            return records.ROW.validate_json(lines[index])
        except ValidationError:
            if lines[index].strip():
                self._damaged.setdefault(name, set()).add(index + 1)
            return None

    @property
    def problems(self) -> list[str]:
        """One line for each file of which something is left out."""
        texts = {name: f"{x}; it is left out." for name, x in self._problems.items()}
        for name, numbers in self._damaged.items():
            texts[name] = f", line {min(numbers)}, is damaged; it is left out."
            if len(numbers) > 1:
                others = f" So are {len(numbers) - 1} other lines."
                texts[name] += others
        return [printable(f"{self.folder / name}{x}") for name, x in texts.items()]


def file_stamp(path: str | os.PathLike) -> Stamp | None:
    """Stamp of a regular file or a folder; None if there is none."""
    try:
        state = os.lstat(path)
    except (OSError, ValueError):
        return None
    is_plain = stat.S_ISREG(state.st_mode) or stat.S_ISDIR(state.st_mode)
    if not is_plain:
        return None
    return Stamp(state.st_mtime_ns, state.st_size, state.st_ino)


def file_stamps(run: pathlib.Path) -> dict[str, Stamp | None]:
    """{path: stamp} of the files of a run and of its stages."""
    stages = [run / name for name in folder_names(run) if name not in SKIPPED]
    paths = [f"{of}/{name}" for of in (run, *stages) for name in os.listdir(of)]
    return {path: file_stamp(path) for path in paths}


def folder_names(folder: str | os.PathLike) -> list[str]:
    """Names of the folders in a folder, sorted, without links."""
    with os.scandir(folder) as entries:
        return sorted(x.name for x in entries if x.is_dir(follow_symlinks=False))


class StageFiles:
    """Log and evaluations of a stage, each read when it is first asked for."""

    def __init__(self, files: Files, name: str, summary: Mapping[str, records.Metrics]):
        """Take the stage's part of the run's summary; {} if a log is newer."""
        self.name = name
        self._files, self._summary = files, summary
        self._log = f"{name}/{METRICS}"

    @functools.cached_property
    def rows(self) -> list[records.Row]:
        """Rows of metrics.jsonl, rounds from 1."""
        return list(self.newest_rows())[::-1]

    def newest_rows(self) -> Iterator[records.Row]:
        """Rows from the last to the first, each parsed when it is asked for."""
        for index in reversed(range(len(self._lines))):
            if row := self._files.row(self._log, self._lines, index):
                yield row

    @functools.cached_property
    def evaluations(self) -> dict[str, records.Evaluation]:
        """{evaluator: see evaluation_record}."""
        return self._files.record(f"{self.name}/{EVALUATION}", records.EVALUATIONS)

    @functools.cached_property
    def last_round(self) -> int:
        """Number of finished rounds or epochs."""
        return next((row["round"] for row in self.newest_rows()), 0)

    @functools.cached_property
    def last_numbers(self) -> dict[str, float]:
        """Metrics of the evaluations and of the last round, {"evaluator/metric": x}."""
        metrics = self._summary or {  # which is the smaller file
            k: x.get("metrics", {}) for k, x in self.evaluations.items()
        }
        numbers = {
            f"{evaluator}/{metric}": value
            for evaluator, values in metrics.items()
            for metric, value in values.items()
        }
        for row in self.newest_rows():
            numbers = {k: x for k, x in row.items() if "/" in k} | numbers
            if numbers:
                break
        return {k: x for k, x in numbers.items() if isinstance(x, int | float)}

    @functools.cached_property
    def _lines(self) -> list[bytes]:
        return self._files.lines(self._log)


class RunFiles:
    """Files of a run directory, each read when it is first asked for."""

    def __init__(self, folder: pathlib.Path, name: str = ""):
        """Look at the files of a run, which is called like its folder by default."""
        self.folder = folder
        self.name = printable(name or folder.name)
        self._files = Files(folder)
        names = [f"{name}/{METRICS}" for name in self._files.folders]
        stamps = {name: self._files.stamp(name) for name in (CONFIG, SUMMARY, *names)}
        written = {k: x.nanoseconds for k, x in stamps.items() if x}
        self._logs = {k: x for k, x in written.items() if k in names}
        self.changed = max(written.values(), default=0) / 1e9  # seconds since the epoch
        self.settled = self._settled_state()  # state of a run that is not locked

    def _settled_state(self) -> str:
        """State by the files, if no process of this machine trains the run."""
        if self._files.stamp(RUNNING):
            return "running"
        summary = self._files.stamp(SUMMARY)
        if self._files.stamp("error.txt") and not summary:
            return "failed"
        newest = max(self._logs.values(), default=0)
        is_newest = summary and summary.nanoseconds >= newest
        return "finished" if is_newest else "stopped"

    @property
    def state(self) -> str:
        """State of now: running, finished, stopped, failed; damaged, by files read."""
        if self._files.is_damaged:
            return DAMAGED
        return "running" if is_locked(self.folder) else self.settled

    @property
    def age(self) -> str:
        """Time since the last write."""
        return age_text(time.time() - self.changed)

    @functools.cached_property
    def config(self) -> records.Config:
        """Config."""
        return self._files.record(CONFIG, records.CONFIG)

    @functools.cached_property
    def stages(self) -> dict[str, StageFiles]:
        """Stages with files, in the order of the config."""
        summary = self._files.record(SUMMARY, records.SUMMARY).get("methods", {})
        declared = ["pretrained", *self.config.get("methods", {}), *summary]
        logged = [log.partition("/")[0] for log in self._logs]
        final = summary if self.settled == "finished" else {}
        return {
            name: StageFiles(self._files, name, final.get(name, {}))
            for name in dict.fromkeys([*declared, *logged])
            if name in logged or name in summary
        }

    @functools.cached_property
    def environment(self) -> records.Environment:
        """Versions and machine."""
        return self._files.record("environment.json", records.ENVIRONMENT)

    @functools.cached_property
    def partition(self) -> records.Partition:
        """Report of the data."""
        return self._files.record(PARTITION, records.PARTITION)

    @functools.cached_property
    def seconds(self) -> float | None:
        """Seconds of training, summed over all starts."""
        return self._files.record("seconds.json", records.SECONDS).get("seconds")

    @property
    def version(self) -> str | None:
        """Version of the library that trained the run; None if unknown."""
        return self.environment.get("versions", {}).get("fedfr_jax")

    @property
    def problems(self) -> list[str]:
        """One line for each of the files read so far that does not fit."""
        return self._files.problems


def is_run(folder: str | os.PathLike) -> bool:
    """Whether a folder is a run directory."""
    if not file_stamp(f"{folder}/{CONFIG}"):
        return False
    if file_stamp(f"{folder}/{PARTITION}"):
        return True
    names = folder_names(folder)
    return any(file_stamp(f"{folder}/{name}/{METRICS}") for name in names)


def is_locked(folder: pathlib.Path) -> bool:
    """Whether a process of this machine trains a run."""
    try:
        locks.lock_to_read(folder).__exit__(None, None, None)
    except locks.RunInUse:
        return True
    return False


def find_runs(
    folder: pathlib.Path,
    depth: int = MAX_DEPTH,
) -> Iterator[pathlib.Path]:
    """Yield run directories in and below a folder, by name, without following links.

    A folder that cannot be read has no runs.
    """
    if is_run(folder):
        yield folder
    elif depth:
        with contextlib.suppress(OSError):
            for name in folder_names(folder):
                if name[0] != "." and name not in SKIPPED:
                    yield from find_runs(folder / name, depth - 1)


def read_run(folder: pathlib.Path, *, name: str = "") -> RunFiles:
    """Open a run; what of it cannot be read is named in its `problems`."""
    if is_run(folder):
        return RunFiles(folder, name)
    description = "a path that does not exist"
    if folder.is_dir():
        inner = ", ".join(map(str, itertools.islice(find_runs(folder), 3)))
        description = (
            f"a folder of runs: name {inner}" if inner else "a folder without a run"
        )
    raise ValueError(f"{folder} must be a run directory, got {description}.")


def config_differences(runs: Sequence[RunFiles]) -> dict[str, list]:
    """Config keys that differ: {"section.key": value in each run or None}."""
    configs = [flat_config(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    values = {key: [config.get(key) for config in configs] for key in keys}
    return {key: x for key, x in values.items() if any(y != x[0] for y in x)}


def age_text(seconds: float) -> str:
    """Format a duration in its largest unit.

    >>> age_text(40), age_text(200), age_text(90000)
    ('40 s', '3 min', '25 h')
    """
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size - size * (unit == "min"):
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def last_numbers(run: RunFiles) -> dict[str, float]:
    """Metrics of the last stage that has any, {"evaluator/metric": value}."""
    stages = reversed(run.stages.values())
    return next((stage.last_numbers for stage in stages if stage.last_numbers), {})


COLUMNS = ("name", "state", "task", "stage", "round", "seconds", "age")


class Listing(NamedTuple):
    """Rows of runs, and one line for each file or run that cannot be read."""

    rows: list[dict[str, Any]]
    problems: list[str]


class KnownRun(NamedTuple):
    """A run as it was when its files were read last."""

    run: RunFiles
    row: dict[str, Any]
    stamps: Mapping[str, Stamp | None]  # of its files, before they were read

    def row_now(self) -> dict[str, Any]:
        """The row with the state and age of now."""
        return {**self.row, "state": self.run.state, "age": self.run.age}

    def fits(self, row: Mapping[str, Any], words: Sequence[str]) -> bool:
        """Whether a row has all words: KEY=VALUE, or a part of its name or state."""
        fields = {
            **flat_config(self.run.config),
            **{name: row[name] for name in COLUMNS},
        }
        text = " ".join(row[name] for name in COLUMNS[:4]).lower()
        pairs = [word.partition("=") for word in words]
        return all(
            key in fields and str(fields[key]) == value
            if is_pair
            else key.lower() in text
            for key, is_pair, value in pairs
        )


class RunList:
    """List of a folder's runs that reads a run again only when its files change.

    Args:
      metric: to show, "evaluator/metric"; "" takes a run's first.
    """

    def __init__(self, folder: pathlib.Path, metric: str = ""):
        self._folder, self._metric = folder, metric
        self._lock = threading.Lock()
        self._runs: dict[pathlib.Path, KnownRun] = {}

    def read(self, words: Sequence[str] = ()) -> Listing:
        """List the runs that fit all words as they are now, by name."""
        if not self._folder.is_dir():
            raise ValueError(
                f"{self._folder} must be a folder of runs, but does not exist."
            )
        runs, problems = {}, []
        with self._lock:
            for path in find_runs(self._folder):
                try:
                    runs[path] = self._read(path)
                except Exception as error:  # one run does not hide the others
                    problems.append(printable(f"{path}: not shown: {error}"))
            self._runs = runs
        rows = []
        for known in runs.values():
            if known.fits(row := known.row_now(), words):
                rows.append(row)
                problems += known.run.problems
        return Listing(rows, problems)

    def find(self, names: Sequence[str]) -> list[RunFiles]:
        """Open the named runs; a name that no run has is left out."""
        if not {*names} <= {known.run.name for known in self._runs.values()}:
            self.read()
        paths = {known.run.name: path for path, known in self._runs.items()}
        paths = {name: paths[name] for name in names if name in paths}
        return [RunFiles(path, name) for name, path in paths.items() if is_run(path)]

    def _read(self, path: pathlib.Path) -> KnownRun:
        stamps, known = file_stamps(path), self._runs.get(path)
        if known and known.stamps == stamps:
            return known
        run = RunFiles(path, run_name(path, self._folder))
        return KnownRun(run, run_row(run, self._metric), stamps)


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
        "task": run.config.get("task", ""),
        "stage": last.name if last else "",
        "round": last.last_round if last else 0,
        "rounds": rounds if last and last.name != "pretrained" else None,
        "metric": metric_name,
        "metric_value": numbers.get(metric_name),
        "metrics": numbers,
        "seconds": run.seconds,
        "changed": run.changed,
        "version": run.version,
    }
    return {**row, "state": run.state, "age": run.age}  # all is read


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
