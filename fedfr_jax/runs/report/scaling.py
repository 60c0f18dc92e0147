"""Charts of a scaling study: scores over model size, fitted laws with bands."""

from collections.abc import Sequence

import numpy as np

from fedfr_jax.runs.report.charts import Chart, Spec, layered
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


def _scores(points: Points, sizes, values, title: str, arrows) -> Spec:
    dots, joined, pairs = [], [], []
    lines = _lines(points)
    for line, rows in lines.items():
        for i in np.flatnonzero(rows):
            is_named = not arrows or points.series[i] == arrows[0]
            label = points.names[i] if is_named else ""
            dots.append({"line": line, "x": sizes[i], "y": values[i], "name": label})
        if not arrows:
            x, which = np.unique(sizes[rows], return_inverse=True)
            y = np.bincount(which, values[rows]) / np.bincount(which)
            joined += [
                {"line": line, "x": a, "y": b} for a, b in zip(x, y, strict=True)
            ]
    for start, end in _pairs(points, arrows):
        ends = {"x": sizes[start], "y": values[start], "x2": sizes[end]}
        pairs.append({**ends, "y2": values[end]})
    layers = [
        ({"type": "line"}, joined, ()),
        ({"type": "rule", "color": "gray"}, pairs, ("x2", "y2")),
        ({"type": "point", "filled": True, "size": 60, "opacity": 1}, dots, ()),
        ({"type": "text", "dx": 6, "dy": 10, "align": "left"}, dots, ("text",)),
    ]
    axis = {"format": "~s", "tickCount": 6}
    return layered(
        layers, list(lines), x=title, y=points.metric, x_axis=axis, height=HEIGHT
    )


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
    bands, laws, runs, held_out, intervals = [], [], [], [], []
    for fit in fits:
        exponent = fit.best.coefficients.exponents[0]
        series = f"{fit.series}: " if fit.series else ""
        line = f"{series}{fit.best.law.name}, exponent {exponent:.3f}"
        sizes, errors = fit.inputs[:, 0], fit.points.errors
        grid = np.geomspace(sizes.min() / MARGIN, sizes.max() * MARGIN, 80)
        law = predict(fit.best.coefficients, grid[:, None])
        low, high = band(fit.replicates, grid[:, None])
        bands += [
            {"line": line, "x": x, "y": y, "y2": y2}
            for x, y, y2 in zip(grid, low, high, strict=True)
        ]
        laws += [{"line": line, "x": x, "y": y} for x, y in zip(grid, law, strict=True)]
        largest = (
            fit.hold_out.is_held_out if fit.hold_out else np.zeros(len(sizes), bool)
        )
        for x, y, is_held_out in zip(sizes, errors, largest, strict=True):
            (held_out if is_held_out else runs).append({"line": line, "x": x, "y": y})
        if fit.hold_out:
            ends = {"y": fit.hold_out.low, "y2": fit.hold_out.high}
            intervals.append({"line": line, "x": sizes[largest][0] * 1.06, **ends})
    heights = [row["y"] for row in laws + runs + held_out]  # a band may be large
    layers = [
        ({"type": "area", "opacity": 0.15, "clip": True}, bands, ("y2",)),
        ({"type": "line"}, laws, ()),
        ({"type": "rule", "strokeWidth": 3, "opacity": 0.6}, intervals, ("y2",)),
        ({"type": "point", "filled": True, "size": 50, "opacity": 1}, runs, ()),
        ({"type": "point", "size": 50, "opacity": 1}, held_out, ()),
    ]
    ends = [min(heights) / ROOM, max(heights) * ROOM]
    x_scale, y_scale = {"type": "log", "nice": False}, {"type": "log", "domain": ends}
    return layered(
        layers,
        list(dict.fromkeys(row["line"] for row in laws)),
        x=title,
        y=error,
        x_scale=x_scale,
        y_scale=y_scale,
        x_axis={"format": "~s", "tickCount": 6},
        y_axis={"format": "~g"},
        height=HEIGHT,
    )


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


def _pairs(points: Points, arrows: Sequence[str]) -> list[tuple[int, int]]:
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
