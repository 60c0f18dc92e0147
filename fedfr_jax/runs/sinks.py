"""Sinks of a stage's numbers: the contract, and the files that every run writes.

The loop counts rounds from 0, files count them from 1. The files survive a kill at any
moment: a line of a log is whole or dropped, summary.json is the old one or the new one,
and a resumed run leaves the same lines as an uninterrupted one. Only the first process
writes.
"""

import contextlib
import csv
import hashlib
import io
import json
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedfr_jax import files, manifest
from fedfr_jax import mesh as meshes
from fedfr_jax.json_files import parse_json_lines

PART_BYTES = 2**20  # of a log of clients, whose lines grow with the cohort
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


class Sink:
    """Receives the numbers of a stage, round by round, and does nothing with them.

    The loop counts rounds, or epochs, from 0.
    """

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the numbers of a round."""

    def clients(self, step: int, values: Mapping[str, Any]) -> None:
        """Take numbers of the round's cohort, {name: [K]}; "client" are their ids."""

    def result(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the evaluation after the last round, `step`."""

    def note(self, text: str) -> None:
        """Take a message between rounds."""

    def ends_call(self, step: int) -> bool:
        """Whether a call of many rounds must end with `step`."""
        return False

    def close(self, error: BaseException | None = None) -> None:
        """Take the end of the stage, or the error that has ended it."""


class JsonlSink(Sink):
    """Append a line `{"round": r, name: number, ...}` per call to a file.

    JSON has no nan and no infinity: such a number is written as null and named under
    the line's "not_finite" key.
    """

    def __init__(self, path: str | os.PathLike, *, resume_step: int = 0):
        """Open the file, repair its end, and drop the rounds after `resume_step`.

        Args:
          path: the file; its folder is created.
          resume_step: number of rounds that are done; 0 starts afresh.
        """
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._begin(self._lines(resume_step))

    def _lines(self, last: int) -> bytes:
        """Lines up to the round `last`."""
        if last:
            with contextlib.suppress(FileNotFoundError):
                return _text_until(read_jsonl(self.path, is_covered=True), last)
        return b""

    def _begin(self, text: bytes) -> None:
        """Open the file with the lines of `text`."""
        self._size, self._sha256 = len(text), hashlib.sha256(text)
        if self.path.name in manifest.read(self.path.parent):  # before its lines
            manifest.cover(self.path.parent, {self.path.name: self._entry()})
        with files.replace_file(self.path) as file:
            file.write(text)
        self._file = self.path.open("ab")

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None:
        line = _line(_finite({"round": int(step) + 1, **scalars})).encode()
        with files.naming(self.path):
            self._file.write(line)
            # Flushed, a line outlives the process, though not a power cut.
            self._file.flush()
        self._size += len(line)
        self._sha256.update(line)

    def synced(self) -> manifest.Entry:
        """Manifest entry of all lines so far, once they outlive a power cut."""
        os.fsync(self._file.fileno())
        return self._entry()

    def _entry(self):
        return manifest.Entry(self._size, self._sha256.hexdigest(), is_log=True)

    def close(self, error: BaseException | None = None) -> None:
        self._file.close()


class ClientLog(JsonlSink):
    """Append a line of the cohort's numbers per round to a file, in parts.

    With a checkpoint a file of PART_BYTES becomes `clients-<its first round>.jsonl` and
    stays as it is, so that a copy in a bucket gets each line about once.
    """

    def __init__(
        self, path: str | os.PathLike, *, resume_step: int = 0, every: int = 1
    ):
        """Open the file, see `JsonlSink`.

        Args:
          every: period of the rounds with all numbers; others have their distribution;
            0: all of them.
        """
        self._every, path = every, pathlib.Path(path)
        super().__init__(path, resume_step=resume_step)
        manifest.cover(path.parent, {part.name: None for part in self._late})
        for part in self._late:  # whose lines are in the file, if they are to stay
            part.unlink()
        kept = {x.name for x in log_parts(path)}
        manifest.cover_files(path.parent, kept - manifest.read(path.parent).keys())

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None:
        pass

    def clients(self, step: int, values: Mapping[str, Any]) -> None:
        self._first = self._first or int(step) + 1
        is_whole = self._every > 0 and (step + 1) % self._every == 0
        super().__call__(step, values if is_whole else distributions(values))

    def _lines(self, last: int) -> bytes:
        """Lines to go on with; parts after the round `last` are removed."""
        lines, parts = super()._lines(last), log_parts(self.path)
        self._late = [part for part in parts if _first_round(part) > last]
        kept = parts[: len(parts) - len(self._late)]
        rows = read_jsonl(kept[-1]) if kept else []
        if rows and rows[-1]["round"] > last:  # an earlier checkpoint is resumed
            lines = _text_until(rows, last)
            self._late.append(kept[-1])
        first = lines.partition(b"\n")[0]
        self._first = json.loads(first)["round"] if first else None
        return lines

    def end_part(self) -> None:
        """Close the file as a part, if it is large, and begin a new one."""
        if self._size < PART_BYTES or not self._first:
            return
        part = self.path.with_name(f"{self.path.stem}-{self._first}.jsonl")
        entry = self.synced()._replace(is_log=False)
        self._file.close()
        manifest.cover(self.path.parent, {self.path.name: None})
        self.path.replace(part)
        manifest.cover(self.path.parent, {part.name: entry})
        self._first = None
        self._begin(b"")


def distributions(values: Mapping[str, Any]) -> dict[str, Any]:
    """Distribution of each of a cohort's numbers {name: [K]}, as text is kept.

    Of a name {"sum": x, "quantiles": [minimum, 10 %, median, 90 %, maximum]}.
    """
    arrays = {k: np.asarray(x) for k, x in values.items() if k != "client"}
    result: dict[str, Any] = {"num_clients": len(values["client"])}
    for name, array in arrays.items():
        if array.ndim and array.size and array.dtype.kind in "biuf":
            numbers = array.astype(np.float64)
            shares = np.quantile(numbers, QUANTILES).tolist()
            result[name] = {"sum": float(numbers.sum()), "quantiles": shares}
        else:
            result[name] = values[name]
    return result


class CsvSink(Sink):
    """Write a log again as a .csv beside it when the stage ends, a row per round."""

    def __init__(self, log: pathlib.Path):
        self._log = log

    def close(self, error: BaseException | None = None) -> None:
        rows = read_jsonl(self._log)
        files.write_text(self._log.with_suffix(".csv"), csv_text(rows))


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as .csv, with a column for each key of any row."""
    text = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def sum_of(numbers: Sequence[float] | Mapping[str, Any]) -> float:
    """Sum of a cohort's numbers in a ClientLog, or of their distribution."""
    return numbers["sum"] if isinstance(numbers, Mapping) else sum(numbers)


def cover_logs(sinks: Iterable[Sink]) -> None:
    """Cover the lines of a stage's logs by its manifest, before their checkpoint."""
    logs = [sink for sink in sinks if isinstance(sink, JsonlSink)]
    for log in logs:
        if isinstance(log, ClientLog):
            log.end_part()
    for folder in {log.path.parent for log in logs}:
        here = [log for log in logs if log.path.parent == folder]
        manifest.cover(folder, {log.path.name: log.synced() for log in here})


def write_json(path: str | os.PathLike, summary: Mapping[str, Any]) -> None:
    """Write JSON as `write_covered` does; see `summary_text`."""
    write_covered(pathlib.Path(path), summary_text(summary))


def summary_text(summary: Mapping[str, Any]) -> str:
    """Format JSON; arrays become lists.

    A number that is not finite is written as null and named, by its dotted path, under
    the key "not_finite".
    """
    return json.dumps(_finite(summary), indent=2, allow_nan=False) + "\n"


def read_jsonl(path: str | os.PathLike, *, is_covered: bool = False) -> list[dict]:
    """Read the rows of a JsonlSink's file, without an unfinished last line.

    Args:
      is_covered: only the lines that the folder's manifest covers, if it covers any.

    Raises:
      ValueError: for a file that is not as it was written, or a line without a round.
    """
    read = manifest.read_covered if is_covered else manifest.read_bytes
    data = read(pathlib.Path(path))
    return parse_json_lines(data, path, "round", int, torn=True)


def read_parts(path: str | os.PathLike) -> Iterator[dict]:
    """Yield the rows of a ClientLog's parts and file, a part at a time."""
    path = pathlib.Path(path)
    for part in [*log_parts(path), path]:
        yield from read_jsonl(part)


def log_parts(path: pathlib.Path) -> list[pathlib.Path]:
    """Closed parts of a ClientLog's file, the oldest first."""
    names = rf"{re.escape(path.stem)}-[1-9][0-9]{{0,17}}\.jsonl"
    found = [x for x in path.parent.iterdir() if re.fullmatch(names, x.name)]
    return sorted(found, key=_first_round)


def _first_round(part: pathlib.Path) -> int:
    return int(part.stem.rpartition("-")[2])


def _text_until(rows: Iterable[Mapping[str, Any]], last: int) -> bytes:
    """Lines of a log's rows up to the round `last`."""
    return "".join(_line(row) for row in rows if row["round"] <= last).encode()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _finite(tree: Mapping[str, Any]) -> dict:
    """Convert a tree to JSON; non-finite numbers become null, their paths noted."""
    notes = {}
    plain = _to_json(tree, "", notes)
    return plain | {"not_finite": notes} if notes else plain


def _to_json(value: Any, path: str, notes: dict[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {
            str(key): _to_json(item, f"{path}.{key}" if path else str(key), notes)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_to_json(item, f"{path}.{i}", notes) for i, item in enumerate(value)]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, os.PathLike):
        return str(value)
    if not isinstance(value, float):
        array = np.asarray(value)
        if array.dtype == object:
            raise TypeError(f"{path} must be a number or text, got {type(value)}.")
        if array.dtype.kind in "biuf" and np.isfinite(array).all():
            return array.tolist()  # at once: there may be a number per client
        return _to_json(array.tolist(), path, notes)
    if math.isfinite(value):
        return float(value)
    notes[path] = str(float(value))
    return None


def write_covered(path: pathlib.Path, text: str) -> None:
    """Write a file atomically and cover it by a manifest, in the first process."""
    if meshes.is_first_process():
        manifest.write(path, text)
