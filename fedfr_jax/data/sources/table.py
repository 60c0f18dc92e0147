"""Tabular data: a .csv whose rows are examples, with numeric and text columns."""

import csv
import os
from collections.abc import Sequence

import numpy as np

from fedfr_jax.data.sources.decoding import check_rows
from fedfr_jax.files import read_list
from fedfr_jax.text import parse_number
from fedfr_jax.types import Source


def table(
    path: str | os.PathLike,
    *,
    label: str,
    client: str | None = None,
    ignore: Sequence[str] = (),
) -> Source:
    """Rows of a .csv with header, as {"numbers": [D], "categories": [C]} float32.

    A column whose cells are all numbers (or empty) is scaled to mean 0 and standard
    deviation 1 over the file; an empty cell becomes 0. Every other column is
    categorical: its values are numbered, no two columns sharing a number. Blanks around
    a cell do not count.

    Args:
      label: column of the classes.
      client: column of the client ids, for the partition `natural`.
      ignore: columns that are left out.
    """
    header, lines = _read(path)
    for name in (label, *filter(None, [client]), *ignore):
        if name not in header:
            raise ValueError(f"{path} must have the column {name!r}, got {header}.")
    columns = dict(zip(header, zip(*lines, strict=True), strict=True))
    for name in (label, *filter(None, [client])):
        if "" in columns[name]:
            line = columns[name].index("") + 2
            raise ValueError(
                f"{path}, line {line}, must have a value in column {name!r}, got an "
                "empty cell. Fill it in, or remove the line."
            )
    names, labels = np.unique(columns[label], return_inverse=True)
    used = [x for x in header if x not in (label, client, *ignore)]
    numbers, categories, count = [], [], 0
    for name in used:
        values = _numbers(columns[name])
        if values is not None:
            scale = np.nanstd(values) or 1.0
            numbers.append(np.nan_to_num((values - np.nanmean(values)) / scale))
            continue
        distinct, codes = np.unique(columns[name], return_inverse=True)
        categories.append(codes + count)
        count += len(distinct)
    inputs = {
        name: np.array(of_name, np.float32).reshape(-1, len(lines)).T
        for name, of_name in (("numbers", numbers), ("categories", categories))
    }
    return Source(
        read=lambda rows: {k: x[check_rows(rows, len(x))] for k, x in inputs.items()},
        labels=labels.astype(np.int32),
        names=tuple(names.tolist()),
        input_shape={k: x.shape[1:] for k, x in inputs.items()},
        client_ids=None if client is None else np.array(columns[client]),
    )


def _read(path) -> tuple[list[str], list[list[str]]]:
    """Read a .csv: (column names, cells of every line), without blanks around them."""
    rows = csv.reader(read_list(path).splitlines() or [""])
    header, *lines = ([cell.strip() for cell in row] for row in rows)
    for number, line in enumerate(lines, 2):
        if len(line) != len(header):
            raise ValueError(
                f"{path}, line {number}, must have {len(header)} cells, got "
                f"{len(line)}."
            )
    if not lines or len({*header}) != len(header):
        raise ValueError(
            f"{path} must have rows and distinct column names, got columns {header}."
        )
    return header, lines


def _numbers(cells: Sequence[str]) -> np.ndarray | None:
    """Parse cells as numbers, empty ones as nan; None if one is a word."""
    try:
        numbers = np.array([parse_number(x) if x else np.nan for x in cells])
    except ValueError:
        return None
    return None if np.isinf(numbers).any() or np.isnan(numbers).all() else numbers
