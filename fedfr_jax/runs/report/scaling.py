"""Plots of a scaling study: scores over model size, fitted laws with bands."""

import os
import pathlib
from collections.abc import Sequence

import numpy as np

from fedfr_jax.runs.report import figures
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
# Ticks of a power of ten, on a short axis and on a long one.
CLOSE, FAR = (1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8), (1, 2, 5)
MIN_SPAN = 1.1  # largest over smallest size: points closer together show no law
WIDTH, HEIGHT = 5.6, 4.4  # inches of a panel
ARROW = {"arrowstyle": "->", "color": "0.3", "shrinkA": 4, "shrinkB": 4}


def plot_scores(
    path: str | os.PathLike, points: Points, *, arrows: Sequence[str] = ()
) -> list[pathlib.Path]:
    """Plot score or error over parameters, a line per series, a panel per definition.

    Axes are linear and points bear their names, as BigFace draws it. A line joins the
    means of runs of one size on the same data.

    Args:
      path: the file; it is written as .png and as .pdf.
      arrows: two series, such as scratch and distilled: an arrow leads from each point
        of the first to that of the same name in the second.
    """
    if arrows and (len(arrows) != 2 or not {*arrows} <= {*points.series}):
        names = sorted({*points.series})
        raise ValueError(
            f"arrows must name two series, from {names}, got {list(arrows)}."
        )
    lines = _lines(points)
    styles = figures.styles(lines)
    figure, axes = figures.panels(len(points.sizes), WIDTH, HEIGHT)
    values = 1 - points.errors if points.is_score else points.errors
    for panel, (name, sizes) in zip(axes, points.sizes.items(), strict=True):
        scale, unit = _unit(sizes)
        for series, rows in lines.items():
            style = {**styles[series], "linestyle": ""}
            panel.plot(sizes[rows] / scale, values[rows], "o", label=series, **style)
            if not arrows:
                x, which = np.unique(sizes[rows], return_inverse=True)
                y = np.bincount(which, values[rows]) / np.bincount(which)
                panel.plot(x / scale, y, **styles[series])
        _label(panel, points, sizes / scale, values, arrows[:1])
        for start, end in _pairs(points, arrows):
            tail, head = ((sizes[i] / scale, values[i]) for i in (start, end))
            panel.annotate("", head, tail, arrowprops=ARROW)
        panel.margins(0.12)
        panel.set(xlabel=TITLES[name] + unit, ylabel=points.metric)
        if len(lines) > 1:
            panel.legend()
    return figures.save(figure, path)


def plot_laws(path: str | os.PathLike, study: Study) -> list[pathlib.Path]:
    """Plot error over size on log axes, with the best law of one input and its band.

    The largest runs are hollow, and a bar is what the others predict for them.

    Returns:
      The paths of the files; [] if no such law was fitted, or the sizes are nearly the
      same.
    """
    fits = [x for x in study.findings if len(x.axes) == 1 and x.best]
    fits = [x for x in fits if x.inputs.max() >= MIN_SPAN * x.inputs.min()]
    if not fits:
        return []
    panels = list(dict.fromkeys(x.axes[0] for x in fits))
    styles = figures.styles(x.series for x in fits)
    figure, axes = figures.panels(len(panels), WIDTH, HEIGHT)
    for panel, name in zip(axes, panels, strict=True):
        heights = []
        for fit in fits:
            if fit.axes == (name,):
                heights += _draw_law(panel, fit, styles[fit.series])
        panel.set(xscale="log", yscale="log", xlabel=TITLES[name])
        panel.set_ylim(min(heights) / ROOM, max(heights) * ROOM)  # a band may be large
        panel.set_ylabel(_error_label(study.points))
        title = f"Scaling law: {_error_label(study.points)} over {TITLES[name]}"
        figures.set_title(panel, title, WIDTH)
        _plain_ticks(panel)
        panel.legend(fontsize=8, loc="lower left")
    caption = f"Band: {LEVEL:.0%} interval of the law."
    if any(x.hold_out for x in fits):
        caption += (
            " Hollow: the largest runs; the bar is the interval of as many % that the "
            "others predict for their mean."
        )
    figures.set_caption(figure, caption)
    return figures.save(figure, path)


def _draw_law(panel, fit: SeriesFit, style) -> tuple[float, ...]:
    """Plot runs, fitted law and band; return the y values that the axis must cover."""
    sizes, errors = fit.inputs[:, 0], fit.points.errors
    line = np.geomspace(sizes.min() / MARGIN, sizes.max() * MARGIN, 80)
    law = predict(fit.best.coefficients, line[:, None])
    low, high = band(fit.replicates, line[:, None])
    exponent = fit.best.coefficients.exponents[0]
    label = f"{fit.series + ': ' if fit.series else ''}{fit.best.law.name}, "
    panel.fill_between(line, low, high, color=style["color"], alpha=0.15, linewidth=0)
    panel.plot(line, law, label=f"{label}exponent {exponent:.3f}", **style)
    color = style["color"]
    marks = {"color": color, "marker": "o", "linestyle": ""}
    if not fit.hold_out:
        panel.plot(sizes, errors, **marks)
        return *errors, *law
    low, high, largest = fit.hold_out.low, fit.hold_out.high, fit.hold_out.is_held_out
    panel.plot(sizes[~largest], errors[~largest], **marks)
    panel.plot(sizes[largest], errors[largest], markerfacecolor="none", **marks)
    x = sizes[largest][:1] * 1.06
    panel.vlines(x, [low], [high], color=color, linewidth=3, alpha=0.6)
    return *errors, *law


def _plain_ticks(panel) -> None:
    """Format tick labels with unit letters, and limit their number."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis, text in ((panel.xaxis, short), (panel.yaxis, "{:g}".format)):
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=CLOSE if high / low < 6 else FAR))
        axis.set_major_formatter(FuncFormatter(lambda x, _, text=text: text(x)))
        axis.set_minor_formatter(NullFormatter())


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


def _unit(sizes) -> tuple[float, str]:
    for scale, unit in ((1e9, ", in billions"), (1e6, ", in millions")):
        if sizes.max() >= scale:
            return scale, unit
    return 1.0, ""


def _label(panel, points, x, y, only: Sequence[str]) -> None:
    """Label points with their names; only those of `only` if arrows join two series."""
    offset = {"xytext": (6, -11), "textcoords": "offset points", "fontsize": 8}
    for name, series, *point in zip(points.names, points.series, x, y, strict=True):
        if name and (not only or series in only):
            panel.annotate(name, point, **offset)


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
