"""The plots of a run, as PNG files; matplotlib is loaded when the first is drawn.

Figures are drawn on their own Agg canvas, never through pyplot: no window, no state
between plots, safe in a thread.
"""

import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Okabe and Ito's colours, told apart by colour-blind readers; dashes beyond eight.
_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#B8A800",
)
_DASHES = ("-", "--", ":", "-.")


def plot_roc(
    path: str | os.PathLike, curves: Mapping[str, tuple[Sequence, Sequence]]
) -> None:
    """True accept rate over false accept rate, a line per method.

    Args:
      path: the PNG file.
      curves: method -> (far [n], tar [n]), both in [0, 1]; points at far 0 have no
        place on the logarithmic axis and are left out.

    Raises:
      ValueError: no curve, or a curve without a point at far > 0.
    """
    figure = _figure(7.6, 4.8)
    axes = figure.subplots()
    for i, (method, (far, tar)) in enumerate(_above_zero(curves).items()):
        axes.plot(far, tar, label=method, **_line(i))
    axes.set(ylim=(0.0, 1.02), ylabel="true accept rate")
    _save_rates(figure, path, curves)


def plot_det(
    path: str | os.PathLike, curves: Mapping[str, tuple[Sequence, Sequence]]
) -> None:
    """False reject rate over false accept rate, both logarithmic, a line per method.

    The error rates that are close to 1 on a ROC are told apart here; the dotted line
    holds the points of equal error.

    Args:
      path: the PNG file.
      curves: as for `plot_roc`; points without a false reject are left out, too.

    Raises:
      ValueError: no curve, or a curve without a point at far > 0.
    """
    figure = _figure(7.6, 4.8)
    axes = figure.subplots()
    lowest = 0.1
    for i, (method, (far, tar)) in enumerate(_above_zero(curves).items()):
        rejected = np.where(tar < 1, 1 - tar, np.nan)
        axes.plot(far, rejected, label=method, **_line(i))
        lowest = min(lowest, float(np.nanmin(rejected, initial=1.0)))
    axes.axline((0.1, 0.1), (1, 1), color="0.6", linestyle=":", linewidth=1)
    axes.set(yscale="log", ylim=(lowest, 1.0), ylabel="false reject rate")
    _save_rates(figure, path, curves)


def _above_zero(curves) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Each curve's points at far > 0, in the order of far."""
    if not curves:
        raise ValueError("curves must hold at least one method, got none.")
    kept = {}
    for method, (far, tar) in curves.items():
        far, tar = np.asarray(far, np.float64), np.asarray(tar, np.float64)
        order = np.argsort(far, kind="stable")
        order = order[far[order] > 0]
        if not order.size:
            raise ValueError(f"curves[{method!r}] must have a far > 0, got {far}.")
        kept[method] = far[order], tar[order]
    return kept


def _save_rates(figure, path, curves) -> None:
    """Finish a plot of generic verification over false accept rates."""
    lowest = min(far[0] for far, _ in _above_zero(curves).values())
    figure.axes[0].set(
        xscale="log",
        xlim=(min(lowest, 0.5), 1.0),
        xlabel="false accept rate",
        title="Generic verification",
    )
    # Inside, it would cover the curves of poor or of many methods.
    figure.legend(loc="outside right upper")
    _save(figure, path)


def plot_personalised(
    path: str | os.PathLike, values: Mapping[str, Mapping[str, Sequence]]
) -> None:
    """How a personalised metric is spread over the clients: box, points and mean.

    Args:
      path: the PNG file.
      values: method -> metric -> [N] one number per client; what is not finite is
        left out.

    Raises:
      ValueError: no method or no metric.
    """
    metrics = list(dict.fromkeys(m for of in values.values() for m in of))
    if not metrics:
        raise ValueError("values must hold at least one method and metric, got none.")
    methods = list(values)
    width = max(3.2, 0.5 + 0.75 * len(methods))
    figure, panels = _panels(len(metrics), width, 4.2)
    for axes, metric in zip(panels, metrics, strict=True):
        for i, method in enumerate(methods):
            numbers = np.asarray(values[method].get(metric, ()), np.float64)
            numbers = numbers[np.isfinite(numbers)]
            if numbers.size:
                _draw_clients(axes, i, numbers)
        axes.set_xticks(range(len(methods)), methods, rotation=30, ha="right")
        axes.set(title=metric, xlim=(-0.6, len(methods) - 0.4))
    panels[0].set_ylabel("value per client (dashed: mean)")
    _save(figure, path)


def plot_rounds(
    path: str | os.PathLike,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    metrics: Sequence[str],
) -> None:
    """Metrics over the rounds, a panel per metric and a line per method.

    Args:
      path: the PNG file.
      rows: method -> rows of its metrics.jsonl; a row needs "round" and may lack a
        metric or hold null. A method with a single row (it has no rounds) is drawn
        as a level line, one with a single number as a point.
      metrics: what to draw.

    Raises:
      ValueError: a metric that no row has a number for; the known ones are listed.
    """
    known = {n for of in rows.values() for row in of for n in row if row[n] is not None}
    known -= {"round"}
    missing = [metric for metric in metrics if metric not in known]
    if missing or not metrics:
        raise ValueError(f"metrics must be among {sorted(known)}, got {list(metrics)}.")
    figure, panels = _panels(len(metrics), 4.2, 3.2)
    lines = {}
    last = max((row["round"] for of in rows.values() for row in of), default=0)
    for axes, metric in zip(panels, metrics, strict=True):
        drawn = []
        for i, (method, of) in enumerate(rows.items()):
            points = [(r["round"], r[metric]) for r in of if r.get(metric) is not None]
            if not points:
                continue
            drawn += [value for _, value in points]
            if len(of) == 1:
                line = axes.axhline(points[0][1], alpha=0.8, **_line(i))
            else:
                line = axes.plot(*zip(*points, strict=True), marker="o", **_line(i))[0]
                line.set_markersize(3 if len(points) > 1 else 6)
            lines.setdefault(method, line)
        # A level line alone would leave both axes at 0 to 1.
        edge = 0.05 * (max(drawn) - min(drawn)) or 0.05
        axes.set(
            title=metric,
            xlabel="round",
            xlim=(-0.04 * max(last, 1), 1.04 * max(last, 1)),
            ylim=(min(drawn) - edge, max(drawn) + edge),
        )
        axes.xaxis.get_major_locator().set_params(integer=True)
    lines = {method: lines[method] for method in rows if method in lines}
    # About 0.09 inch a letter and 0.6 for the handle.
    longest = 0.6 + 0.09 * max(map(len, lines))
    num_columns = min(len(lines), max(1, int(figure.get_figwidth() / longest)))
    num_lines = math.ceil(len(lines) / num_columns)
    figure.set_figheight(figure.get_figheight() + 0.22 * num_lines)
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=num_columns
    )
    _save(figure, path)


def _draw_clients(axes, i: int, numbers: np.ndarray) -> None:
    """One method's column: a box when there is a distribution, points, the mean."""
    colour = _line(i)["color"]
    if numbers.size >= 5:
        axes.boxplot(
            numbers,
            positions=[i],
            widths=0.6,
            showfliers=False,
            manage_ticks=False,
            medianprops={"color": colour, "linewidth": 2},
            boxprops={"color": colour},
            whiskerprops={"color": colour},
            capprops={"color": colour},
        )
    # Spread by rank parity of the golden ratio: even, and the same every time.
    offset = (np.arange(numbers.size) * 0.618034 % 1.0 - 0.5) * 0.36
    axes.plot(i + offset, numbers, "o", color=colour, markersize=3, alpha=0.5)
    axes.hlines(numbers.mean(), i - 0.4, i + 0.4, color=colour, linestyle="--")


def _line(i: int) -> dict[str, str]:
    return {
        "color": _COLOURS[i % len(_COLOURS)],
        "linestyle": _DASHES[i // len(_COLOURS) % len(_DASHES)],
    }


def _figure(width: float, height: float):
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install matplotlib.") from error
    return Figure(figsize=(width, height), layout="constrained")


def _panels(number: int, width: float, height: float):
    """A figure and its `number` axes, at most three in a row."""
    num_columns = 2 if number == 4 else min(number, 3)
    num_rows = math.ceil(number / num_columns)
    figure = _figure(width * num_columns, height * num_rows)
    grid = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axes in grid[number:]:
        axes.remove()
    return figure, list(grid[:number])


def _save(figure, path: str | os.PathLike) -> None:
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
