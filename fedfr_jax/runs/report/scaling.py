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
MARGIN = 1.5  # how far a law is drawn beyond its runs, as a factor
ROOM = 1.15  # above and below what is drawn, as a factor
CLOSE, FAR = (
    (1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8),
    (1, 2, 5),
)  # ticks of a power of ten
MIN_SPAN = 1.1  # largest over least size: points closer together show no law
WIDTH, HEIGHT = 5.6, 4.4  # inches of a panel


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

    Returns:
      The paths of the files.
    """
    if arrows and (len(arrows) != 2 or not {*arrows} <= {*points.series}):
        known = sorted({*points.series})
        raise ValueError(
            f"arrows must name two series, from {known}, got {list(arrows)}."
        )
    lines = _lines(points)
    styles = figures.styles(lines)
    figure, axes = figures.panels(len(points.sizes), WIDTH, HEIGHT)
    shown = 1 - points.errors if points.is_score else points.errors
    for panel, (name, sizes) in zip(axes, points.sizes.items(), strict=True):
        scale, unit = _unit(sizes)
        for one, mine in lines.items():
            style = {**styles[one], "linestyle": ""}
            panel.plot(sizes[mine] / scale, shown[mine], "o", label=one, **style)
            if not arrows:
                x, which = np.unique(sizes[mine], return_inverse=True)
                y = np.bincount(which, shown[mine]) / np.bincount(which)
                panel.plot(x / scale, y, **styles[one])
        _label(panel, points, sizes / scale, shown, arrows[:1])
        for start, end in _pairs(points, arrows):
            _arrow(panel, *((sizes[i] / scale, shown[i]) for i in (start, end)))
        panel.margins(0.12)
        panel.set(xlabel=TITLES[name] + unit, ylabel=points.metric)
        if len(lines) > 1:
            panel.legend()
    return figures.save(figure, path)


def plot_laws(path: str | os.PathLike, study: Study) -> list[pathlib.Path]:
    """Plot error over size on log axes, with the best law of one input and its band.

    The largest runs are hollow, and a bar is what the others say of them.

    Returns:
      The paths of the files; none where no such law could be fitted, or to sizes that
      are nearly the same.
    """
    found = [x for x in study.findings if len(x.axes) == 1 and x.best]
    found = [x for x in found if x.inputs.max() >= MIN_SPAN * x.inputs.min()]
    if not found:
        return []
    panels = list(dict.fromkeys(x.axes[0] for x in found))
    styles = figures.styles(x.series for x in found)
    figure, axes = figures.panels(len(panels), WIDTH, HEIGHT)
    for panel, name in zip(axes, panels, strict=True):
        mine = [x for x in found if x.axes == (name,)]
        seen = [y for one in mine for y in _draw_law(panel, one, styles[one.series])]
        panel.set(xscale="log", yscale="log", xlabel=TITLES[name])
        panel.set_ylim(min(seen) / ROOM, max(seen) * ROOM)  # a band may be endless
        panel.set_ylabel(_error_label(study.points))
        title = f"Scaling law: {_error_label(study.points)} over {TITLES[name]}"
        figures.set_title(panel, title, WIDTH)
        _plain_ticks(panel)
        panel.legend(fontsize=8, loc="lower left")
    words = f"Band: {LEVEL:.0%} interval of the law."
    if any(x.hold_out for x in found):
        words += " Hollow: the largest runs; the bar is the interval of as many % that "
        words += "the others predict for their mean."
    figures.set_caption(figure, words)
    return figures.save(figure, path)


def _draw_law(panel, found: SeriesFit, style) -> tuple[float, ...]:
    """Plot runs, fitted law and band; returns the y values the axis must cover."""
    sizes, errors = found.inputs[:, 0], found.points.errors
    line = np.geomspace(sizes.min() / MARGIN, sizes.max() * MARGIN, 80)
    law = predict(found.best.coefficients, line[:, None])
    low, high = band(found.replicates, line[:, None])
    exponent = found.best.coefficients.exponents[0]
    label = f"{found.series + ': ' if found.series else ''}{found.best.law.name}, "
    panel.fill_between(line, low, high, color=style["color"], alpha=0.15, linewidth=0)
    panel.plot(line, law, label=f"{label}exponent {exponent:.3f}", **style)
    largest = (
        found.hold_out.is_held_out if found.hold_out else np.zeros(len(sizes), bool)
    )
    marks = {"color": style["color"], "marker": "o", "linestyle": ""}
    panel.plot(sizes[~largest], errors[~largest], **marks)
    if found.hold_out:
        panel.plot(sizes[largest], errors[largest], markerfacecolor="none", **marks)
        beside = sizes[largest][:1] * 1.06
        ends = [found.hold_out.low], [found.hold_out.high]
        panel.vlines(beside, *ends, color=style["color"], linewidth=3, alpha=0.6)
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
    for name, series, *place in zip(points.names, points.series, x, y, strict=True):
        if name and (not only or series in only):
            panel.annotate(
                name, place, xytext=(6, -11), textcoords="offset points", fontsize=8
            )


def _pairs(points: Points, arrows: Sequence[str]) -> list[tuple[int, int]]:
    """Rows of the same name in the two series of `arrows`: (first, second)."""
    if not arrows:
        return []
    place = {
        key: i for i, key in enumerate(zip(points.series, points.names, strict=True))
    }
    first, second = arrows
    return [
        (i, place[second, name])
        for (series, name), i in place.items()
        if series == first and (second, name) in place
    ]


def _arrow(panel, start, end) -> None:
    style = {"arrowstyle": "->", "color": "0.3", "shrinkA": 4, "shrinkB": 4}
    panel.annotate("", end, start, arrowprops=style)
