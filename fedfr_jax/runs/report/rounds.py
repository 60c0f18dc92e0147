"""Plots over rounds: losses and evaluated metrics.

Losses share a panel only if they are comparable: the same terms, and all of clients or
all of central training. A central stage counts epochs, not rounds, so next to federated
stages its metrics are a horizontal line.
"""

import math
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from fedfr_jax.metric_names import panel_title
from fedfr_jax.runs.report import figures

# Metrics whose name ends with "_loss" are terms of the loss, except these.
_NO_TERMS = ("initial_loss", "personal_loss")
# Written by the loop over rounds and not by central training.
_PER_CLIENT = {"steps", "num_idle_clients", "padding_ratio"}
SIMULATED = "simulated_seconds"  # since the first round, where clients take time
EPSILON = "epsilon"  # after each round, of private training
_MARKERS = "os^Dv<>p"
_MAX_MARKERS = 12  # of a line

Rows = Sequence[Mapping[str, Any]]  # of a metrics.jsonl
Points = Sequence[tuple[float, float]]  # (round or time, value)


class _Panel(NamedTuple):
    title: str
    name: str  # of the metric
    unit: str  # of the x axis: round, epoch or simulated seconds
    lines: dict[str, Points]
    levels: dict[str, float]


def plot_rounds(
    path: str | os.PathLike,
    rows: Mapping[str, Rows],
    *,
    evaluators: Collection[str] = (),
    finals: Mapping[str, Mapping[str, float]] | None = None,
    styles: figures.Styles | None = None,
) -> list[pathlib.Path]:
    """Plot the training loss and each evaluated metric over rounds, a line per stage.

    Args:
      path: the file; it is written as .png and as .pdf.
      rows: stage -> rows of its metrics.jsonl; a row needs "round" and may lack a
        metric or hold null. A metric is evaluated when its name begins with an
        evaluator's and a slash.
      evaluators: their names.
      finals: stage -> {"evaluator/metric": value} at its end, for stages without
        rounds.
      styles: stage -> keywords of its line.

    Returns:
      The paths of the files; [] if there is nothing to draw.
    """
    panels = _loss_panels(rows, evaluators) + _privacy_panels(rows)
    panels += _metric_panels(rows, evaluators, finals or {})
    if not panels:
        return []
    styles = _with_markers(styles or figures.styles([*rows, *(finals or {})]))
    visible = [s for s in styles if any(s in p.lines or s in p.levels for p in panels)]
    figure, all_axes = figures.panels(len(panels), 4.4, 3.4, visible)
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw(axes, panel, styles)
        figures.set_title(axes, panel.title, 3.8)
    _add_legend(figure, visible, styles)
    if any(panel.levels for panel in panels):
        note = "Level lines: stages that have no rounds, at their end."
        figures.set_caption(figure, note)
    return figures.save(figure, path)


def _loss_panels(rows: Mapping[str, Rows], evaluators) -> list[_Panel]:
    """A panel per kind of loss."""
    kinds = {}
    for stage, stage_rows in rows.items():
        if points := _points(stage_rows, "loss"):
            kind = _is_federated(stage_rows), _terms(stage_rows, evaluators)
            kinds.setdefault(kind, {})[stage] = points
    panels = []
    for (is_federated, terms), lines in kinds.items():
        names = ", ".join(term.removesuffix("_loss") for term in terms)
        title = f"Training loss ({names})" if terms else "Training loss"
        title += "\nmean over clients" if is_federated else "\ncentral training"
        if any(_points(rows[stage], EPSILON) for stage in lines):
            title += " (not private)"
        unit = "round" if is_federated else "epoch"
        panels.append(_Panel(title, "loss", unit, lines, {}))
    return panels


def _privacy_panels(rows: Mapping[str, Rows]) -> list[_Panel]:
    """A panel with the epsilon of private stages after each round, if any."""
    lines = {stage: p for stage, x in rows.items() if (p := _points(x, EPSILON))}
    return [_Panel("Privacy spent", EPSILON, "round", lines, {})] if lines else []


def _metric_panels(rows: Mapping[str, Rows], evaluators, finals) -> list[_Panel]:
    """A panel per metric with at least two evaluations, without duplicates."""
    names = dict.fromkeys(n for x in rows.values() for row in x for n in row)
    federated = [stage for stage in rows if _is_federated(rows[stage])]
    panels = []
    for name in names:
        evaluator, slash, metric = name.partition("/")
        lines = {stage: p for stage, x in rows.items() if (p := _points(x, name))}
        if not lines or not slash or evaluator not in evaluators:
            continue
        ends = {stage: points[-1][1] for stage, points in lines.items()}
        ends |= {s: x[name] for s, x in finals.items() if _is_finite(x.get(name))}
        unit = "round" if any(stage in lines for stage in federated) else "epoch"
        if unit == "round":
            lines = {stage: p for stage, p in lines.items() if stage in federated}
        levels = {stage: end for stage, end in ends.items() if stage not in lines}
        if all(len(points) < 2 for points in lines.values()):
            continue  # one evaluation is a line of the result table, no curve
        if any((lines, levels) == (panel.lines, panel.levels) for panel in panels):
            continue  # of ten clients the worst is the worst decile
        title = panel_title(evaluator, metric)
        panels.append(_Panel(title, name, unit, lines, levels))
        timed = {s: p for s in lines if (p := _points(rows[s], name, SIMULATED))}
        if timed:
            title += "\nover simulated time"
            panels.append(_Panel(title, name, "simulated seconds", timed, {}))
    return panels


def _points(rows: Rows, name: str, over: str = "round") -> Points:
    finite = [row for row in rows if _is_finite(row.get(name)) and over in row]
    return [(row[over], row[name]) for row in finite]


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _is_federated(rows: Rows) -> bool:
    return any(not _PER_CLIENT.isdisjoint(row) for row in rows)


def _terms(rows: Rows, evaluators: Collection[str]) -> tuple[str, ...]:
    """Names of the terms of a stage's loss, in order of appearance."""
    names = {name: None for row in rows for name in row}
    return tuple(
        name
        for name in names
        if name.partition("/")[0] not in evaluators
        and name.endswith("_loss")
        and name not in _NO_TERMS
    )


def _with_markers(styles: figures.Styles) -> dict[str, dict[str, Any]]:
    """Add hollow markers of different shapes, so that equal lines are visible."""
    return {
        stage: {
            **style,
            "marker": _MARKERS[i % len(_MARKERS)],
            "markersize": 4 + 0.5 * (i % len(_MARKERS)),
            "markerfacecolor": "none",
        }
        for i, (stage, style) in enumerate(styles.items())
    }


def _draw(axes, panel: _Panel, styles: figures.Styles) -> None:
    """Draw lines and horizontal lines of a panel, and set its axes."""
    values, rounds = list(panel.levels.values()), set()
    for i, (stage, points) in enumerate(panel.lines.items()):
        x, y = zip(*points, strict=True)
        line = axes.plot(x, y, **styles[stage])[0]
        if len(points) == 1:
            line.set(markersize=8 + i % 4, markeredgewidth=2)
        every = -(-len(points) // _MAX_MARKERS)
        line.set_markevery((i * every // len(panel.lines), every))
        values += y
        rounds.update(x)
    for stage, level in panel.levels.items():
        axes.axhline(level, **{**styles[stage], "marker": None, "linewidth": 1})
    is_rate = panel.name not in ("loss", EPSILON) and figures.are_rates(values)
    first, last = min(rounds, default=1), max(rounds, default=1)
    edge = 0.04 * (last - first) or 0.5
    axes.set(
        xlabel=panel.unit,
        ylabel=panel.name,
        xlim=(first - edge, last + edge),
        ylim=figures.limits(values, is_rate=is_rate),
    )
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def _add_legend(figure, stages: Sequence[str], styles: figures.Styles) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=stage, **styles[stage]) for stage in stages]
    figure.legend(handles=handles, loc="outside right upper")
