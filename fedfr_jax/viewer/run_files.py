"""Files of run directories, read without JAX and in any state of the run."""

import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from fedfr_jax.json_files import parse_json
from fedfr_jax.runs import locks
from fedfr_jax.runs.scratch import RUNNING

CONFIG, SUMMARY, METRICS = "config.json", "summary.json", "metrics.jsonl"
MAX_DEPTH = 4  # folders below the one whose runs are listed
SKIPPED = ("checkpoints", "store", "tensorboard", "pictures")
LARGEST = 2**28  # bytes of a file that is read whole


class StageFiles(NamedTuple):
    """Logs and evaluations of a stage."""

    name: str
    rows: Sequence[Mapping[str, Any]]  # of metrics.jsonl, rounds from 1
    evaluations: Mapping[str, Mapping[str, Any]]  # evaluator: see evaluation_record

    @property
    def last_round(self) -> int:
        """Number of finished rounds or epochs."""
        return self.rows[-1]["round"] if self.rows else 0


class RunFiles(NamedTuple):
    """Files of a run directory."""

    folder: pathlib.Path
    name: str
    config: Mapping[str, Any]
    stages: Mapping[str, StageFiles]
    environment: Mapping[str, Any]
    partition: Mapping[str, Any]
    seconds: float | None  # of training, summed over all starts
    state: str  # running, finished, stopped or failed
    changed: float  # seconds since the epoch when a file was written last
    problems: Sequence[str]  # one line each: what could not be read

    @property
    def version(self) -> str | None:
        """Version of the library that trained the run; None before 0.3."""
        return self.environment.get("versions", {}).get("fedfr_jax")


def is_run(folder: pathlib.Path) -> bool:
    """Whether a folder is a run directory."""
    return (folder / CONFIG).is_file() and (
        any(folder.glob(f"*/{METRICS}")) or (folder / "partition.json").is_file()
    )


def find_runs(folder: pathlib.Path, depth: int = MAX_DEPTH) -> Iterator[pathlib.Path]:
    """Yield run directories in and below a folder, by name, without following links."""
    if is_run(folder):
        yield folder
    elif depth:
        inner = sorted(path for path in folder.iterdir() if path.is_dir())
        for path in inner:
            if path.name[0] != "." and path.name not in SKIPPED:
                if not path.is_symlink():
                    yield from find_runs(path, depth - 1)


def read_run(folder: pathlib.Path, *, name: str = "") -> RunFiles:
    """Read a run as it is now; damaged files are skipped and named in `problems`."""
    if not is_run(folder):
        _raise_no_run(folder)
    problems = []
    summary = _json(folder / SUMMARY, problems)
    config = _json(folder / CONFIG, problems)
    stages = {
        stage: _stage(folder / stage, summary.get("methods", {}).get(stage), problems)
        for stage in _stage_names(folder, config, summary)
    }
    written = [p.stat().st_mtime for p in folder.glob("*/*.json*")]
    written += [p.stat().st_mtime for p in folder.glob("*.json")]
    return RunFiles(
        folder=folder,
        name=name or folder.name,
        config={key: x for key, x in config.items() if key != "sha256"},
        stages=stages,
        environment=_json(folder / "environment.json", problems),
        partition=_json(folder / "partition.json", problems),
        seconds=_json(folder / "seconds.json", problems).get("seconds"),
        state=_state(folder),
        changed=max(written, default=folder.stat().st_mtime),
        problems=problems,
    )


def _raise_no_run(folder: pathlib.Path) -> NoReturn:
    """Raise ValueError that explains why a folder is not a run directory."""
    description = "a path that does not exist"
    if folder.is_dir():
        inner = ", ".join(map(str, itertools.islice(find_runs(folder), 3)))
        description = (
            f"a folder of runs: name {inner}" if inner else "a folder without a run"
        )
    raise ValueError(f"{folder} must be a run directory, got {description}.")


def _json(path: pathlib.Path, problems: list[str]) -> dict:
    """Read a JSON object; {} if missing or damaged, with the damage in `problems`."""
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(
                f"{path} must have at most {LARGEST >> 20} MiB, got a larger file."
            )
        return parse_json(path.read_bytes(), path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{error} It is left out.".replace(". It", "; it"))
        return {}


def _stage_names(folder, config, summary) -> list[str]:
    """Names of stages with files, in the order of the config."""
    declared = ["pretrained", *config.get("methods", {}), *summary.get("methods", {})]
    logged = [path.parent.name for path in sorted(folder.glob(f"*/{METRICS}"))]
    with_files = {*logged, *summary.get("methods", {})}
    return [name for name in dict.fromkeys([*declared, *logged]) if name in with_files]


def _stage(folder, metrics, problems) -> StageFiles:
    rows = _rows(folder / METRICS, problems)
    evaluations = _json(folder / "evaluation.json", problems)
    if not evaluations and metrics:  # of a version that kept the summary alone
        evaluations = {name: {"metrics": values} for name, values in metrics.items()}
    return StageFiles(folder.name, rows, evaluations)


def _rows(path: pathlib.Path, problems: list[str]) -> list[dict]:
    """Read the rows of a log; skip damaged lines and an unfinished last one."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return []
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # the last has no end yet
        try:
            row = json.loads(line)
            rows.append({**row, "round": int(row["round"])})
        except (ValueError, TypeError, KeyError, RecursionError):
            if line.strip():
                problems.append(f"{path}, line {number}, is damaged; it is left out.")
    if any(row["round"] == 0 for row in rows):  # of the first versions
        rows = [{**row, "round": row["round"] + 1} for row in rows]
    return rows


def _state(folder: pathlib.Path) -> str:
    if (folder / RUNNING).is_file():
        return "running"
    try:
        locks.lock_to_read(folder).__exit__(None, None, None)
    except locks.RunInUse:
        return "running"
    except ValueError:
        pass
    if (folder / "error.txt").is_file() and not (folder / SUMMARY).is_file():
        return "failed"
    return "finished" if _is_finished(folder) else "stopped"


def _is_finished(folder: pathlib.Path) -> bool:
    """Whether the summary is newer than all logs."""
    summary = folder / SUMMARY
    if not summary.is_file():
        return False
    logs = [path.stat().st_mtime for path in folder.glob(f"*/{METRICS}")]
    return summary.stat().st_mtime >= max(logs, default=0)


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
    numbers = {}
    for stage in run.stages.values():
        stage_numbers = {
            f"{evaluator}/{metric}": value
            for evaluator, evaluation in stage.evaluations.items()
            for metric, value in evaluation.get("metrics", {}).items()
        }
        for row in reversed(stage.rows):
            stage_numbers = {k: x for k, x in row.items() if "/" in k} | stage_numbers
            if stage_numbers:
                break
        numbers = stage_numbers or numbers
    return {
        key: value for key, value in numbers.items() if isinstance(value, int | float)
    }
