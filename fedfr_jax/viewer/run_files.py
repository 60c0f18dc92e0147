"""Files of run directories, read without JAX and in any state of the run.

A run may be a stranger's. `Files` alone reads its files: regular files in real folders,
not links, pipes or devices, of the types in `records`. A file that does not fit is left
out and named in one line.
"""

import contextlib
import functools
import itertools
import os
import pathlib
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from pydantic import TypeAdapter, ValidationError

from fedfr_jax import manifest
from fedfr_jax.files import read_regular
from fedfr_jax.runs import locks
from fedfr_jax.runs.remote import RUNNING
from fedfr_jax.text import printable
from fedfr_jax.viewer import records

CONFIG, SUMMARY, METRICS = "config.json", "summary.json", "metrics.jsonl"
EVALUATION, PARTITION = "evaluation.json", "partition.json"
MAX_DEPTH = 4  # folders below the one whose runs are listed
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
            self._problems[name] = _rule_text(error)
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


def _rule_text(error: ValidationError) -> str:
    """The first rule that a JSON file breaks, such as ": task must be text"."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return f" must be readable JSON, got {first['msg']}"
    place = ".".join(str(x) for x in first["loc"])
    rule = first["msg"].removeprefix("Input should be ")
    return f": {place or 'it'} must be {rule}, got {str(first['input'])[:60]!r}"


class StageFiles:
    """Log and evaluations of a stage, each read when it is first asked for."""

    def __init__(
        self,
        files: Files,
        name: str,
        summary: Mapping[str, records.Metrics],
        *,
        is_final: bool,
    ):
        """Take the stage's part of the run's summary, which may be older than a log."""
        self.name = name
        self._files, self._summary, self._is_final = files, summary, is_final
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
        metrics = self._summary if self._is_final else {}  # the smaller file
        metrics = metrics or {
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
        return {k: x for k, x in numbers.items() if isinstance(x, float)}

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
        self._logs = [name for name in names if self._files.stamp(name)]
        written = [self._files.stamp(name) for name in (CONFIG, SUMMARY, *self._logs)]
        times = [state.nanoseconds / 1e9 for state in written if state]
        self.changed = max(times, default=0.0)  # seconds since the epoch
        self.settled = self._settled_state()  # state of a run that is not locked

    def _settled_state(self) -> str:
        """State by the files, if no process of this machine trains the run."""
        if self._files.stamp(RUNNING):
            return "running"
        summary = self._files.stamp(SUMMARY)
        if self._files.stamp("error.txt") and not summary:
            return "failed"
        logs = [self._files.stamp(name).nanoseconds for name in self._logs]
        is_newest = summary and summary.nanoseconds >= max(logs, default=0)
        return "finished" if is_newest else "stopped"

    @functools.cached_property
    def state(self) -> str:
        """State: running, finished, stopped or failed."""
        return "running" if is_locked(self.folder) else self.settled

    @property
    def is_damaged(self) -> bool:
        """Whether a file read so far is not as it was written."""
        return self._files.is_damaged

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
        is_final = self.settled == "finished"
        return {
            name: StageFiles(
                self._files, name, summary.get(name, {}), is_final=is_final
            )
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
    if not is_run(folder):
        _raise_no_run(folder)
    return RunFiles(folder, name)


def _raise_no_run(folder: pathlib.Path) -> NoReturn:
    """Raise ValueError that explains why a folder is not a run directory."""
    description = "a path that does not exist"
    if folder.is_dir():
        inner = ", ".join(map(str, itertools.islice(find_runs(folder), 3)))
        description = (
            f"a folder of runs: name {inner}" if inner else "a folder without a run"
        )
    raise ValueError(f"{folder} must be a run directory, got {description}.")


def flat_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"section.key": value}, the keys of nested sections joined by dots.

    >>> flat_config({"seed": 1, "model": {"name": "mlp"}})
    {'seed': 1, 'model.name': 'mlp'}
    """
    flat = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_config(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


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
