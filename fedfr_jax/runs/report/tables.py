"""Result table of a run, and how numbers are written in all tables.

It reads the summary `{"methods": {method: {section: {metric: number}}}, "seconds":
number}`, where a section is an evaluator, whatever its name. A list in place of a
number (one per client, or per seed) shows as mean and standard deviation. The best
method of a metric is marked when it is better by more than rounding.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from fedfr_jax.metric_names import direction
from fedfr_jax.text import printable

MAX_COLUMNS = 8  # methods as columns; more become rows


class _Row(NamedTuple):
    """A metric of all methods."""

    section: str
    metric: str
    texts: list[str]  # one per method
    best: int | None  # index of a method

    def cell(self, method: int) -> Text:
        """What the table shows for a method."""
        return _text(self.texts[method], is_best=method == self.best)


def result_table(summary: Mapping[str, Any]) -> Table:
    """Build a table, a row per metric and a column per method, best in bold.

    With more than MAX_COLUMNS methods it has a row per method.
    """
    methods, rows = [*summary["methods"]], _rows(summary["methods"])
    caption = _text(_caption(summary), keep="\n")
    table = Table(caption=caption if caption else None, caption_justify="left")
    if len(methods) > MAX_COLUMNS:
        table.add_column("method", no_wrap=True)
        for row in rows:
            head = _text(f"{row.section}\n{row.metric}", keep="\n")
            table.add_column(head, justify="right")
        for i, method in enumerate(methods):
            table.add_row(_text(method), *(row.cell(i) for row in rows))
        return table
    table.add_column("evaluator")
    table.add_column("metric", no_wrap=True)
    for method in methods:
        table.add_column(_text(method), justify="right")
    for section, of_section in itertools.groupby(rows, lambda row: row.section):
        table.add_section()
        for row in of_section:
            cells = (row.cell(i) for i in range(len(methods)))
            table.add_row(_text(section), _text(row.metric), *cells)
            section = ""  # once
    return table


def best_value(methods: Mapping[str, Any]) -> str:
    """Describe in one line which method leads the first metric with a direction."""
    for row in _rows(methods):
        if row.best is not None:
            name, text = [*methods][row.best], row.texts[row.best]
            return f"best {row.section} {row.metric}: {name} ({text})"
    return "no setting leads a metric by more than rounding"


def _text(text: str, *, is_best: bool = False, keep: str = "") -> Text:
    """Text of a cell, bold if best; names may hold markup and escapes."""
    return Text(printable(text, keep), style="bold" if is_best else "")


def _rows(methods: Mapping[str, Any]) -> list[_Row]:
    """Rows of every metric of any method, by section, in order of appearance."""
    metrics: dict[str, dict[str, None]] = {}
    for of_method in methods.values():
        for section, numbers in of_method.items():
            if isinstance(numbers, Mapping):
                metrics.setdefault(section, {}).update(dict.fromkeys(numbers))
    rows = []
    for section, names in metrics.items():
        for metric in names:
            values = [x.get(section, {}).get(metric) for x in methods.values()]
            texts = [number_text(value) for value in values]
            rows.append(_Row(section, metric, texts, best_index(metric, values)))
    return rows


def number_text(value: Any) -> str:
    """Format a number, or the mean and standard deviation of several.

    Fractions have a fixed number of digits, so that columns can be compared by eye.

    >>> number_text(0.98765), number_text(12), number_text(None)
    ('0.9877', '12', '-')
    >>> number_text([0.4, 0.6])
    '0.500±0.100'
    """
    numbers = _numbers(value)
    if not numbers.size:
        return value if isinstance(value, str) else "-"
    mean = _mean_text(value)
    return f"{mean}±{numbers.std():.3f}" if np.ndim(value) else mean


def _numbers(value: Any) -> np.ndarray:
    """Finite numbers of a value, [n]; empty for None and text."""
    flat = np.ravel(np.asarray(value, object))
    is_number = lambda x: isinstance(x, int | float | np.number) and math.isfinite(x)
    return np.array([x for x in flat if is_number(x)], np.float64)


def _mean_text(value: Any) -> str:
    """Format the mean of a value."""
    mean = _numbers(value).mean()
    if np.ndim(value):
        return f"{mean:.3f}"
    if isinstance(value, int):
        return str(value)
    if mean and abs(mean) < 5e-5:
        return f"{mean:.2e}"
    return f"{mean:.4f}" if abs(mean) < 10 else f"{mean:.5g}"


def best_index(metric: str, values: Sequence[Any]) -> int | None:
    """Index of the best mean; None if the second is the same up to rounding."""
    numbers, sign = [_numbers(value) for value in values], direction(metric)
    means = {i: sign * x.mean() for i, x in enumerate(numbers) if x.size}
    if len(means) < 2 or not sign:
        return None
    first, second = sorted(means, key=lambda i: -means[i])[:2]
    texts = [_mean_text(values[i]) for i in (first, second)]
    unit = max(10.0 ** -len(text.partition(".")[2]) for text in texts)
    is_clear = texts[0] != texts[1] and means[first] - means[second] > unit / 2
    return first if is_clear else None


def _caption(summary: Mapping[str, Any]) -> str:
    """Total time by use, and which methods are trained privately."""
    lines, methods = [], summary["methods"]
    if (seconds := summary.get("seconds")) is not None:
        shares = summary.get("time_shares", {})
        large = [f"{use} {100 * x:.0f} %" for use, x in shares.items() if x >= 0.01]
        uses = f": {', '.join(large)}" if large else ""
        lines.append(f"{seconds:.0f} s in all{uses}")
    if private := [name for name in methods if "privacy" in methods[name]]:
        lines.append(
            f"{', '.join(private)}: the model is private at this epsilon; numbers "
            "measured on clients' own data are not."
        )
    for name, neighbors in summary.get("neighbors", {}).items():
        lines.append(f"{name}: epsilon is of {neighbors} neighbors.")
    return "\n".join(lines)
