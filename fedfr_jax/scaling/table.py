"""Tables of runs: files, sweeps, and BigFace's published results.

A table of runs is a .csv, .json or .jsonl, the folder of a sweep, or BigFace's. A row
has the parameters by one or more of three definitions (params_backbone;
params_with_head, with all class vectors; params_active, with those that a step uses),
optionally the training data (num_images, num_identities, num_images_seen with
repetitions) and the flops of the whole training, a metric, a name, and a series, whose
points are plotted and fitted separately.

BigFace's sizes and scores, read off its plots to 0.0001, are of ResNets with CosFace on
the 2,059,906 identities of WebFace42M with synthetic masks on a share of the images,
one run each: true accept rates on IJB-C at a false accept rate of 1e-4, with and
without synthetic masks, and the score of the Masked Face Recognition challenge (ICCV
2021), a false reject rate, of the network alone and distilled from a larger one. The
network of 159 M parameters is in its plot only.
"""

import csv
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax import manifest
from fedfr_jax.files import read_list
from fedfr_jax.json_files import read_json, read_json_lines
from fedfr_jax.schema import has_kind, naming
from fedfr_jax.text import parse_number

DEFINITIONS = ("params_backbone", "params_with_head", "params_active")
DATA = ("num_images", "num_identities", "num_images_seen")
RESULTS = "results.jsonl"  # in the folder of a sweep
TABLES = {"bigface": pathlib.Path(__file__).with_name("bigface.csv")}


class Points(NamedTuple):
    """n evaluated runs: errors, sizes, data and cost."""

    metric: str  # the column of the errors or scores
    is_score: bool  # larger is better: the error is 1 - score
    errors: np.ndarray  # [n], smaller is better
    sizes: Mapping[str, np.ndarray]  # {definition: [n]}
    data: Mapping[str, np.ndarray]  # {one of DATA: [n]}
    flops: np.ndarray | None  # [n] of training
    names: tuple[str, ...]  # n, "" where there is none
    series: tuple[str, ...]  # n

    def take(self, chosen: np.ndarray) -> "Points":
        """Select the runs where `chosen` [n] is True."""
        pick = lambda values: {name: x[chosen] for name, x in values.items()}
        return self._replace(
            errors=self.errors[chosen],
            sizes=pick(self.sizes),
            data=pick(self.data),
            flops=None if self.flops is None else self.flops[chosen],
            names=tuple(np.array(self.names, object)[chosen]),
            series=tuple(np.array(self.series, object)[chosen]),
        )


def read_rows(table: str) -> list[dict]:
    """Read a table of runs: a file, the folder of a sweep, or a name in TABLES."""
    path = TABLES.get(table) or pathlib.Path(table)
    path = path / RESULTS if path.is_dir() else path
    readers = {".csv": _read_csv, ".json": _read_json, ".jsonl": read_json_lines}
    if path.suffix not in readers or not path.is_file():
        raise ValueError(
            f"the table must be one of {sorted(TABLES)}, the folder of a sweep or a "
            f"file of {sorted(readers)}, got {table!r}."
        )
    if path.stem == "results":  # of a sweep
        manifest.read_bytes(path)
    with naming(path):
        return readers[path.suffix](path)


def _read_csv(path: pathlib.Path) -> list[dict]:
    rows = csv.DictReader(read_list(path).splitlines(), restkey="")
    return [{key: _number(value) for key, value in row.items()} for row in rows]


def _read_json(path: pathlib.Path) -> list[dict]:
    rows = read_json(path, list)
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} must hold a list of objects, got {str(rows)[:60]}.")
    return rows


def _number(text: str | None) -> float | str | None:
    """Parse a csv cell as a number; None if it is empty."""
    if not text:
        return None
    try:
        return parse_number(text)
    except ValueError:
        return text


def points(
    rows: Sequence[Mapping],
    metric: str,
    *,
    is_score: bool = False,
    series: str = "series",
) -> Points:
    """Collect the runs with a value of `metric`; failed runs are left out.

    Args:
      metric: a column; its errors are positive, its scores lie in [0, 1).
      series: the column by which points are grouped.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    rows = [row for row in rows if row.get(metric) is not None]
    if not rows:
        raise ValueError(
            f"the table must have the column {metric!r} with a value in some row, got "
            f"columns {columns}."
        )
    # A network that is all head has a backbone of 0, which no law can be fitted to.
    positive = [{name: row.get(name) or None for name in DEFINITIONS} for row in rows]
    sizes = {}
    for name, column in _columns(positive, DEFINITIONS).items():
        if not any(np.array_equal(column, x) for x in sizes.values()):
            sizes[name] = column  # each once: a head may be all active
    if not sizes:
        raise ValueError(
            f"the table must have one of {DEFINITIONS} in every row, got columns "
            f"{columns}."
        )
    values = _numbers(rows, metric)
    errors = 1 - values if is_score else values
    is_bad = (errors <= 0) | (errors > (1 if is_score else np.inf))
    if is_bad.any():
        rule = "in [0, 1)" if is_score else "positive"
        bad = values[is_bad][0]
        raise ValueError(f"{metric} must be {rule} in every row, got {bad:g}.")
    return Points(
        metric=metric,
        is_score=is_score,
        errors=errors,
        sizes=sizes,
        data=_columns(rows, DATA),
        flops=_columns(rows, ["flops"]).get("flops"),
        names=tuple(str(row.get("name") or "") for row in rows),
        series=tuple(str(row.get(series) or "") for row in rows),
    )


def _columns(rows: Sequence[Mapping], names: Sequence[str]) -> dict[str, np.ndarray]:
    """The columns [n] that every row has, of positive numbers."""
    columns = {}
    for name in names:
        if all(row.get(name) is not None for row in rows):
            columns[name] = column = _numbers(rows, name)
            if (column <= 0).any():
                rule, bad = "a positive number in every row", column[column <= 0][0]
                raise ValueError(f"{name} must be {rule}, got {bad:g}.")
    return columns


def _numbers(rows: Sequence[Mapping], name: str) -> np.ndarray:
    """A column [n] that every row has."""
    for row in rows:
        if not has_kind(float, row[name]):
            rule = "a finite number in every row"
            raise ValueError(f"{name} must be {rule}, got {row[name]!r}.")
    return np.array([row[name] for row in rows], float)
