"""Sinks of a run's metrics: the contract, and the files that every run writes.

A sink takes (round, {name: number}) and is closed once. The loop counts rounds from 0,
files count them from 1.

The files survive a kill at any moment: a line of metrics.jsonl is whole or dropped,
summary.json is the old one or the new one, and a resumed run leaves the same lines as
an uninterrupted one. Only the first process writes.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from fedfr_jax import files
from fedfr_jax import mesh as meshes
from fedfr_jax.json_files import read_json_lines


class Sink(Protocol):
    """Receives the metrics of one round, which the loop counts from 0.

    Optional methods: `histograms(step, {name: [K]})` takes the cohort's numbers,
    `note(text)` shows a message between rounds, and `ends_call(step)` is True if a call
    of many rounds must end with `step`.
    """

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """Append a line `{"round": r, name: number, ...}` per call to a file.

    JSON has no nan and no infinity: such a number is written as null and named under
    the line's "not_finite" key.
    """

    def __init__(self, path: str | os.PathLike, *, resume_step: int | None = None):
        """Open the file, repair its end, and drop the rounds after `resume_step`.

        Args:
          path: the file; its folder is created.
          resume_step: rounds that are done: lines of later ones are dropped, so 0
            starts afresh; None keeps all.
        """
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            row
            for row in (read_jsonl(path) if path.exists() else [])
            if resume_step is None or row["round"] <= resume_step
        ]
        write_text(path, "".join(_line(row) for row in rows))
        self._file = path.open("a", encoding="utf-8")

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None:
        self._file.write(_line(_finite({"round": int(step) + 1, **scalars})))
        # Flushed, a line outlives the process, though not a power cut.
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def write_summary(path: str | os.PathLike, summary: Mapping[str, Any]) -> None:
    """Write JSON atomically; arrays become lists.

    A number that is not finite is written as null and named, by its dotted path, under
    the key "not_finite".
    """
    text = json.dumps(_finite(summary), indent=2, allow_nan=False)
    write_text(pathlib.Path(path), text + "\n")


def read_jsonl(path: str | os.PathLike) -> list[dict]:
    """Read the rows of a JsonlSink's file, without an unfinished last line.

    Files of earlier versions count rounds from 0: they are read as from 1.
    """
    rows = read_json_lines(path, "round", int, torn=True)
    is_old = any(row["round"] == 0 for row in rows)
    return [{**row, "round": row["round"] + 1} for row in rows] if is_old else rows


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


def write_text(path: pathlib.Path, text: str) -> None:
    """Write a file atomically, in the first process."""
    if meshes.is_first_process():
        files.write_text(path, text)
