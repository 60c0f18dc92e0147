"""Charts of a scaling study: scores over model size, fitted laws with bands."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedfr_jax.runs.report.charts import Chart, Spec, add_marks, line_chart
from fedfr_jax.scaling import Points, Study, predict
from fedfr_jax.scaling.intervals import LEVEL, band
from fedfr_jax.scaling.report import short
from fedfr_jax.scaling.study import SeriesFit

TITLES = {
    "params_backbone": "parameters of the backbone",
    "params_with_head": "parameters with the classes' weights",
    "params_active": "parameters that a step touches",
    "num_images": "training images",
    "num_images_seen": "images seen in training",
    "num_identities": "identities trained on",
}
MARGIN = 1.5  # factor by which a law is drawn beyond its runs
ROOM = 1.15  # factor of the y axis' limits
MIN_SPAN = 1.1  # largest over smallest size: points closer together show no law
HEIGHT = 320  # pixels
DOT = {"type": "point", "filled": True, "size": 60, "opacity": 1}


def score_charts(points: Points, *, arrows: Sequence[str] = ()) -> list[Chart]:
    """Score or error over parameters, a line per series, a chart per definition.

    Axes are linear and points bear their names, as BigFace draws it. A line joins the
    means of runs of one size on the same data.

    Args:
      arrows: two series, such as scratch and distilled: a line leads from each point
        of the first to that of the same name in the second.
    """
    if arrows and (len(arrows) != 2 or not {*arrows} <= {*points.series}):
        names = sorted({*points.series})
        raise ValueError(
            f"arrows must name two series, from {names}, got {list(arrows)}."
        )
    values = 1 - points.errors if points.is_score else points.errors
    return [
        Chart(
            f"{points.metric} over {TITLES[name]}",
            _scores(points, sizes, values, TITLES[name], arrows),
            f"Lines lead from {arrows[0]} to {arrows[1]}." if arrows else "",
        )
        for name, sizes in points.sizes.items()
    ]


def _scores(
    points: Points, sizes: np.ndarray, values: np.ndarray, title: str, arrows
) -> Spec:
    means, dots = {}, []
    for line, rows in _lines(points).items():
        x, which = np.unique(sizes[rows], return_inverse=True)
        y = np.bincount(which, values[rows]) / np.bincount(which)
        means[line] = [] if arrows else _pairs(x, y)
        for i in np.flatnonzero(rows):
            is_named = not arrows or points.series[i] == arrows[0]
            label = points.names[i] if is_named else ""
            dots += [{**_row(line, sizes[i], values[i]), "name": label}]
    spec = line_chart(
        means, x=title, y=points.metric, y_scale={"zero": False}, is_y_titled=True
    )
    spec["height"] = HEIGHT
    joins = [
        {
            **_row(points.series[start], sizes[start], values[start]),
            **{"x2": float(sizes[end]), "y2": float(values[end])},
        }
        for start, end in _same_names(points, arrows)
    ]
    ends = {"x2": {"field": "x2"}, "y2": {"field": "y2"}, "color": {"value": "gray"}}
    add_marks(spec, {"type": "rule"}, joins, **ends)
    add_marks(spec, DOT, dots)
    text = {"type": "text", "dx": 6, "dy": 10, "align": "left"}
    add_marks(spec, text, dots, text={"field": "name"}, color={"value": "black"})
    return spec


def law_charts(study: Study) -> list[Chart]:
    """Error over size on log axes, with the best law of one input and its band.

    The largest runs are hollow, and a bar is what the others predict for them. None if
    no such law was fitted, or the sizes are nearly the same.
    """
    fits = [x for x in study.findings if len(x.axes) == 1 and x.best]
    fits = [x for x in fits if x.inputs.max() >= MIN_SPAN * x.inputs.min()]
    note = f"Band: {LEVEL:.0%} interval of the law."
    if any(x.hold_out for x in fits):
        note += (
            " Hollow: the largest runs; the bar is the interval of as many % that the "
            "others predict for their mean."
        )
    error = _error_label(study.points)
    return [
        Chart(
            f"Scaling law: {error} over {TITLES[name]}",
            _laws([x for x in fits if x.axes == (name,)], TITLES[name], error),
            note,
        )
        for name in dict.fromkeys(x.axes[0] for x in fits)
    ]


def _laws(fits: list[SeriesFit], title: str, error: str) -> Spec:
    laws, bands, runs, largest, intervals = {}, [], [], [], []
    for fit in fits:
        assert fit.best and fit.replicates  # of a series that has a best law
        best, sizes, errors = fit.best, fit.inputs[:, 0], fit.points.errors
        series = f"{fit.series}: " if fit.series else ""
        line = f"{series}{best.law.name}, exponent {best.coefficients.exponents[0]:.3f}"
        grid = np.geomspace(sizes.min() / MARGIN, sizes.max() * MARGIN, 80)
        laws[line] = _pairs(grid, predict(best.coefficients, grid[:, None]))
        low, high = band(fit.replicates, grid[:, None])
        bands += [
            {**_row(line, x, y), "y2": float(y2)}
            for x, y, y2 in zip(grid, low, high, strict=True)
        ]
        held_out = np.zeros(len(sizes), bool)
        if fit.hold_out:
            held_out = fit.hold_out.is_held_out
            x = sizes[held_out][0] * 1.06
            ends = _row(line, x, fit.hold_out.low), float(fit.hold_out.high)
            intervals.append({**ends[0], "y2": ends[1]})
        for x, y, is_held_out in zip(sizes, errors, held_out, strict=True):
            (largest if is_held_out else runs).append(_row(line, x, y))
    heights = [y for points in laws.values() for _, y in points]
    heights += [row["y"] for row in runs + largest]  # a band may be large
    ends = [min(heights) / ROOM, max(heights) * ROOM]
    spec = line_chart(
        laws,
        x=title,
        y=error,
        log_x=True,
        y_scale={"type": "log", "domain": ends},
        is_y_titled=True,
    )
    spec["height"] = HEIGHT
    y2 = {"field": "y2"}
    add_marks(spec, {"type": "area", "opacity": 0.15, "clip": True}, bands, y2=y2)
    rule = {"type": "rule", "strokeWidth": 3, "opacity": 0.6, "clip": True}
    add_marks(spec, rule, intervals, y2=y2)
    add_marks(spec, DOT, runs)
    add_marks(spec, {**DOT, "filled": False}, largest)
    return spec


def _row(line: str, x: float, y: float) -> dict[str, Any]:
    return {"line": line, "x": float(x), "y": float(y)}


def _pairs(x: np.ndarray, y: np.ndarray) -> list[tuple[float, float]]:
    return list(zip(x.tolist(), y.tolist(), strict=True))


def _lines(points: Points) -> dict[str, np.ndarray]:
    """Masks of the runs that a line joins: {series and data: [n] bool}."""
    data = {k: x for k, x in points.data.items() if len(np.unique(x)) > 1}
    names = []
    for i, series in enumerate(points.series):
        parts = [f"{short(x[i])} {k.replace('_', ' ')}" for k, x in data.items()]
        names.append(", ".join(part for part in (series, *parts) if part))
    return {name: np.array(names) == name for name in dict.fromkeys(names)}


def _error_label(points: Points) -> str:
    return f"1 - {points.metric}" if points.is_score else points.metric


def _same_names(points: Points, arrows: Sequence[str]) -> list[tuple[int, int]]:
    """Rows of the same name in the two series of `arrows`: (first, second)."""
    if not arrows:
        return []
    keys = zip(points.series, points.names, strict=True)
    rows = {key: i for i, key in enumerate(keys)}
    first, second = arrows
    return [
        (i, rows[second, name])
        for (series, name), i in rows.items()
        if series == first and (second, name) in rows
    ]
