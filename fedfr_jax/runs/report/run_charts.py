"""Charts of the stages of runs, the same in the page and as files.

They are made of what a run has written: rows of metrics.jsonl, the evaluators' parts of
evaluation.json, partition.json.
"""

import math
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fedfr_jax.metric_names import metric_label, panel_title
from fedfr_jax.runs.report import charts
from fedfr_jax.runs.report.charts import Chart

FIRST = ("loss", "epsilon")  # curves that are shown first, with the evaluations
SIMULATED = "simulated_seconds"  # since the first round, where clients take time
Rows = Sequence[Mapping[str, Any]]


class Line(NamedTuple):
    """A stage of a run: one line of every chart and one row of every table."""

    name: str
    rows: Rows  # of its metrics.jsonl
    evaluations: Mapping[str, Mapping[str, Any]]  # of its evaluation.json
    client_names: Sequence[str] = ()
    folder: pathlib.Path = pathlib.Path()  # of the run


class Part(NamedTuple):
    """A part of a stage's evaluation, such as a curve."""

    line: Line
    evaluator: str
    name: str
    value: Any  # as of evaluation.json

    @property
    def title(self) -> str:
        """Title among parts of several lines."""
        return f"{self.line.name}: {self.evaluator}, {self.name}"


def parts(lines: Sequence[Line], kind: str) -> Iterator[Part]:
    """Yield the parts of a kind of all evaluations of all lines."""
    for line in lines:
        for evaluator, evaluation in line.evaluations.items():
            for name, value in evaluation.get(kind, {}).items():
                yield Part(line, evaluator, name, value)


def evaluators(lines: Sequence[Line]) -> list[str]:
    """Names of the evaluators of any line."""
    return list(dict.fromkeys(name for line in lines for name in line.evaluations))


def points(rows: Rows, name: str, over: str = "round") -> list[tuple[float, float]]:
    """Finite values of a metric: [(round, value)]."""
    return [
        (row[over], row[name])
        for row in rows
        if row.get(over) is not None
        and isinstance(row.get(name), int | float)
        and math.isfinite(row[name])
    ]


def curve_charts(lines: Sequence[Line], order: Sequence[str]) -> dict[str, list[Chart]]:
    """Curve charts: "main" has losses and evaluations, "more" all others."""
    names = dict.fromkeys(n for line in lines for row in line.rows for n in row)
    names = sorted(names, key=lambda name: name not in FIRST)  # before its only term
    curves, drawn = {"main": [], "more": []}, []
    for name in names:
        if name in ("round", "not_finite", SIMULATED):
            continue
        evaluator, is_evaluated, metric = name.partition("/")
        of_line = _curves(lines, name)
        if not of_line or of_line in drawn:
            continue  # the term of a loss of one term is the loss
        drawn.append(of_line)
        title = panel_title(evaluator, metric) if is_evaluated else metric_label(name)
        spec = charts.line_chart(of_line, order, x="round or epoch", y=name)
        note = "" if is_evaluated or name == "epsilon" else privacy_note(lines, of_line)
        is_main = is_evaluated or name in FIRST
        curves["main" if is_main else "more"].append(Chart(title, spec, note))
        if is_evaluated and (timed := _curves(lines, name, over=SIMULATED)):
            spec = charts.line_chart(timed, order, x="simulated seconds", y=name)
            curves["main"].append(Chart(f"{title}, over simulated time", spec))
    return curves


def _curves(lines, name: str, over: str = "round") -> dict[str, list]:
    """{line: points}; {} for single points, which are cells of the table, no curve."""
    of_line = {line.name: points(line.rows, name, over) for line in lines}
    of_line = {line: values for line, values in of_line.items() if values}
    return of_line if max(map(len, of_line.values()), default=0) > 1 else {}


def rate_charts(lines: Sequence[Line], order: Sequence[str]) -> list[Chart]:
    """ROC, DET and other curves of every evaluator."""
    by_kind: dict[tuple[str, str], dict[str, Any]] = {}
    for part in parts(lines, "curves"):
        curves = by_kind.setdefault((part.evaluator, part.name), {})
        curves[part.line.name] = part.value
    plots = []
    names = evaluators(lines)
    for evaluator, kind in sorted(by_kind, key=lambda key: names.index(key[0])):
        curves = by_kind[evaluator, kind]
        if kind != "roc":
            plots.append(_plain_curve(evaluator, kind, curves, order))
            continue
        for name, spec in charts.error_rate_charts(curves, order).items():
            title = f"{metric_label(evaluator)}: {name}"
            plots.append(Chart(title, spec, _rate_note(curves), name.lower()))
    return plots


def _rate_note(curves: Mapping[str, Mapping[str, Any]]) -> str:
    """Note on the number of pairs behind the rates."""
    curve = next(iter(curves.values()))
    values = dict(zip(curve["fields"], curve["values"], strict=True))
    if not values.get("num_negatives"):
        return ""
    return (
        f"{values['num_positives']:,.0f} pairs of one identity and "
        f"{values['num_negatives']:,.0f} of two. Rates of fewer than "
        f"{charts.MIN_COUNTED} wrong pairs are mostly chance."
    )


def _plain_curve(evaluator, kind, curves, order) -> Chart:
    of_line = {
        name: [p for p in zip(*curve["values"][:2], strict=True) if None not in p]
        for name, curve in curves.items()
    }
    x, y = next(iter(curves.values()))["fields"][:2]
    spec = charts.line_chart(of_line, order, x=metric_label(x), y=y)
    return Chart(panel_title(evaluator, kind), spec, file=kind)


def per_client(lines: Sequence[Line]) -> dict[tuple[str, str], dict[str, Any]]:
    """{(evaluator, metric): {line: numbers of clients, and their "names"}}."""
    by_metric = {}
    for line, evaluator, metric, values in parts(lines, "per_client"):
        names = dict(enumerate(line.client_names))
        client_names = [names.get(i, f"client {i}") for i in values["ids"]]
        of_metric = by_metric.setdefault((evaluator, metric), {})
        of_metric[line.name] = {**values, "names": client_names}
    return by_metric


def client_charts(lines: Sequence[Line], order: Sequence[str]) -> list[Chart]:
    """Charts of each metric's distribution over the clients."""
    return [
        Chart(
            panel_title(evaluator, metric),
            charts.client_chart(values, order, metric=metric),
            privacy_note(lines, values),
            evaluator,
        )
        for (evaluator, metric), values in per_client(lines).items()
    ]


def privacy_note(lines: Sequence[Line], names: Collection[str]) -> str:
    """Note on lines of private training, whose clients' values are not private."""
    private = [x.name for x in lines if x.name in names and points(x.rows, "epsilon")]
    return f"Not private, though training is: {', '.join(private)}." if private else ""


def partition_charts(report: Mapping[str, Any]) -> list[Chart]:
    """The heat map of a report of the data, if it has a table of classes."""
    if "table" not in report:
        return []
    num_shown, num_clients = len(report["table"]["train"]), report["clients"]
    class_word, classes_word = report.get("kind", ("class", "classes"))
    title = f"{num_clients} clients, {len(report['classes'])} {classes_word}"
    notes = []
    if num_shown < num_clients:
        notes.append(f"The first {num_shown} clients.")
    if num_shown > charts.CROWD:
        notes.append(f"Sorted by their largest {class_word}.")
    spec = charts.partition_chart(report)
    return [Chart(title, spec, " ".join(notes), "partition")]


def map_charts(lines: Sequence[Line]) -> list[Chart]:
    """Maps of identities' embeddings in two dimensions."""
    return [
        Chart(
            part.title,
            charts.map_chart(part.value),
            f"Two principal components, {part.value['explained']:.0%} of the variance.",
        )
        for part in parts(lines, "maps")
    ]
