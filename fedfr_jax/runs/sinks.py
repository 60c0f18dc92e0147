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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedfr_jax import files, manifest
from fedfr_jax import mesh as meshes
from fedfr_jax.json_files import parse_json_lines


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
        self.path = path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = b""
        if resume_step:
            with contextlib.suppress(FileNotFoundError):
                text = _lines_until(path, resume_step)
        self._size, self._sha256 = len(text), hashlib.sha256(text)
        if path.name in manifest.read(path.parent):  # before the lines that it covers
            manifest.cover(path.parent, {path.name: self._entry()})
        with files.replace_file(path) as file:
            file.write(text)
        self._file = path.open("ab")

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
    """Append a line of the cohort's numbers per round to a file."""

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None:
        pass

    def clients(self, step: int, values: Mapping[str, Any]) -> None:
        super().__call__(step, values)


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


def cover_logs(sinks: Iterable[Sink]) -> None:
    """Cover the lines of a stage's logs by its manifest, before their checkpoint."""
    logs = [sink for sink in sinks if isinstance(sink, JsonlSink)]
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


def _lines_until(path: pathlib.Path, last: int) -> bytes:
    """Lines of a log up to the round `last`, all of them covered."""
    rows = read_jsonl(path, is_covered=True)
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
