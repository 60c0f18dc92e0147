"""Result table of a run.

It reads the summary `{"methods": {method: {section: {metric: number}}}, "seconds":
number}`, where a section is an evaluator, whatever its name. A list in place of a
number (one per client, or per seed) shows as mean and standard deviation. The best
method of a metric is marked when it is better by more than rounding.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedfr_jax.metric_names import direction
from fedfr_jax.text import printable

MAX_COLUMNS = 8  # methods as columns; more become rows


class _Row(NamedTuple):
    section: str
    metric: str
    cells: tuple[str, ...]  # one per method
    is_best: tuple[bool, ...]


def result_table(summary: Mapping[str, Any]) -> Any:
    """Build a rich Table, a row per metric and a column per method, best in bold.

    With more than MAX_COLUMNS methods it has a row per method.
    """
    from rich.table import Table
    from rich.text import Text

    caption = Text(printable(_caption(summary), keep="\n"))
    table = Table(caption=caption if caption else None, caption_justify="left")
    is_long = len(_methods(summary)) > MAX_COLUMNS
    fill = _fill_with_methods if is_long else _fill_with_metrics
    fill(table, summary)
    return table


def best_value(methods: Mapping[str, Any]) -> str:
    """Describe in one line which method leads the first metric with a direction."""
    for row in _rows({"methods": methods}):
        if any(row.is_best):
            name = list(methods)[row.is_best.index(True)]
            cell = row.cells[row.is_best.index(True)]
            return f"best {row.section} {row.metric}: {name} ({cell})"
    return "no setting leads a metric by more than rounding"


def _fill_with_methods(table, summary):
    """Fill the table with a row per method, a column per metric."""
    from rich.text import Text

    rows = _rows(summary)
    table.add_column("method", no_wrap=True)
    for row in rows:
        head = f"{printable(row.section)}\n{printable(row.metric)}"
        table.add_column(Text(head), justify="right")
    for i, method in enumerate(_methods(summary)):
        cells = [_text(row.cells[i], row.is_best[i]) for row in rows]
        table.add_row(_text(method), *cells)


def _fill_with_metrics(table, summary):
    """Fill the table with a row per metric, a column per method."""
    table.add_column("evaluator")
    table.add_column("metric", no_wrap=True)
    for method in _methods(summary):
        table.add_column(_text(method), justify="right")
    previous = None
    for row in _rows(summary):
        is_new = row.section != previous
        if is_new and previous is not None:
            table.add_section()
        cells = map(_text, row.cells, row.is_best)
        section = _text(row.section if is_new else "")
        table.add_row(section, _text(row.metric), *cells)
        previous = row.section


def _text(text: str, is_best: bool = False):
    """Text of a cell, bold if best; names may hold markup and escapes."""
    from rich.text import Text

    return Text(printable(text), style="bold" if is_best else "")


def _methods(summary: Mapping[str, Any]) -> tuple[str, ...]:
    methods = tuple(summary.get("methods", {}))
    if not methods:
        raise ValueError('summary["methods"] must have at least one method, got none.')
    return methods


def _rows(summary: Mapping[str, Any]) -> list[_Row]:
    """Rows of every metric of any method, by section, in order of appearance."""
    methods = [summary["methods"][name] for name in _methods(summary)]
    names = {
        (section, metric): None
        for method in methods
        for section, metrics in method.items()
        if isinstance(metrics, Mapping)
        for metric in metrics
    }
    sections = list(dict.fromkeys(section for section, _ in names))
    rows = []
    for section, metric in sorted(names, key=lambda name: sections.index(name[0])):
        values = [method.get(section, {}).get(metric) for method in methods]
        cells = tuple(_cell(value) for value in values)
        rows.append(_Row(section, metric, cells, _best(metric, values)))
    return rows


def _numbers(value: Any) -> np.ndarray:
    """Finite numbers of a value, [n]; empty for None."""
    flat = [np.nan if v is None else v for v in np.ravel(np.asarray(value, object))]
    numbers = np.asarray(flat, np.float64)
    return numbers[np.isfinite(numbers)]


def _cell(value: Any) -> str:
    numbers = _numbers(value)
    if not numbers.size:
        return "-"
    mean = _displayed(value)
    return f"{mean}±{numbers.std():.3f}" if _is_list(value) else mean


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray)


def _displayed(value: Any) -> str:
    """Format the mean of a value."""
    if isinstance(value, int):
        return str(value)
    mean = _numbers(value).mean()
    # Fixed digits for fractions, so that columns can be compared by eye.
    if _is_list(value):
        return f"{mean:.3f}"
    return f"{mean:.4f}" if abs(mean) < 10 else f"{mean:.5g}"


def _best(metric: str, values: Sequence[Any]) -> tuple[bool, ...]:
    """Mask of the method with the best mean; all False if the second looks equal."""
    finite = [i for i, value in enumerate(values) if _numbers(value).size]
    no_best = (False,) * len(values)
    sign = direction(metric)
    if len(finite) < 2 or not sign:
        return no_best
    first, second = sorted(finite, key=lambda i: -sign * _numbers(values[i]).mean())[:2]
    if not _differ(values[first], values[second]):
        return no_best
    return tuple(i == first for i in range(len(values)))


def _differ(value: Any, other: Any) -> bool:
    """Whether two means differ as printed, by more than rounding."""
    texts = [_displayed(value), _displayed(other)]
    unit = max(10.0 ** -len(text.partition(".")[2]) for text in texts)
    difference = abs(_numbers(value).mean() - _numbers(other).mean())
    return texts[0] != texts[1] and difference > unit / 2


def _uses(summary: Mapping[str, Any]) -> str:
    """Shares of the time by use, from 1 %."""
    shares = summary.get("time_shares", {})
    large = [f"{use} {100 * x:.0f} %" for use, x in shares.items() if x >= 0.01]
    return f": {', '.join(large)}" if large else ""


def _caption(summary: Mapping[str, Any]) -> str:
    """Total time, and which methods are trained privately."""
    seconds, methods = summary.get("seconds"), summary["methods"]
    private = [name for name in methods if "privacy" in methods[name]]
    lines = [] if seconds is None else [f"{seconds:.0f} s in all{_uses(summary)}"]
    if private:
        lines.append(
            f"{', '.join(private)}: the model is private at this epsilon; numbers "
            "measured on clients' own data are not."
        )
    for name, neighbors in summary.get("neighbors", {}).items():
        lines.append(f"{name}: epsilon is of {neighbors} neighbors.")
    return "\n".join(lines)
