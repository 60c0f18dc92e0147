"""How a metric is spread over the clients, a column per stage."""

import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from fedfr_jax.runs.report import figures

MOST_METRICS = 4
FEWEST_OF_A_BOX = 5  # clients from which quartiles are drawn


def plot_clients(
    path: str | os.PathLike,
    values: Mapping[str, Mapping[str, Sequence]],
    *,
    evaluator: str = "personalised",
    styles: figures.Styles | None = None,
) -> list[pathlib.Path]:
    """Box, points and mean of each metric, a panel per metric.

    Args:
      path: the file; it is written as .png and as .pdf.
      values: stage -> metric -> [N] one number per client; what is not finite is left
        out, and so are metrics after the fourth.
      evaluator: what made them, for the title.
      styles: stage -> keywords of its line.

    Returns:
      The paths of the files.

    Raises:
      ValueError: no stage or no metric.
    """
    metrics = list(dict.fromkeys(m for of in values.values() for m in of))
    if not metrics:
        raise ValueError("values must hold at least one stage and metric, got none.")
    shown, styles = metrics[:MOST_METRICS], styles or figures.styles(values)
    width = max(3.6, 0.8 + 0.6 * len(values))
    figure, panels = figures.panels(len(shown), width, 4.2)
    for axes, metric in zip(panels, shown, strict=True):
        columns = {s: _finite(values[s].get(metric, ())) for s in values}
        _draw_metric(axes, metric, columns, styles)
        figures.set_title(axes, figures.title_of(evaluator, metric), width - 0.6)
    note = "A point per client; dashed: mean"
    columns = [of.get(metric, ()) for of in values.values() for metric in shown]
    if max(len(_finite(column)) for column in columns) >= FEWEST_OF_A_BOX:
        note += "; box: median and quartiles; whiskers: 5th and 95th percentile"
    note += "."
    if len(metrics) > len(shown):
        note += f" The first {len(shown)} of {len(metrics)} metrics."
    figures.set_caption(figure, note)
    return figures.save(figure, path)


def _finite(values: Sequence) -> np.ndarray:
    numbers = np.asarray(values, np.float64)
    return numbers[np.isfinite(numbers)]


def _draw_metric(axes, metric: str, columns: Mapping[str, np.ndarray], styles) -> None:
    """One panel: the columns of all stages, and axes that suit them."""
    for i, (stage, numbers) in enumerate(columns.items()):
        if numbers.size:
            _draw_clients(axes, i, numbers, styles[stage]["color"])
    everything = np.concatenate(list(columns.values()))
    if everything.size:
        is_rate = figures.are_rates(everything)
        axes.set_ylim(figures.limits(everything, is_rate=is_rate))
    axes.set_xlim(-0.6, len(columns) - 0.4)
    axes.set_xticks(range(len(columns)), list(columns), rotation=30, ha="right")
    axes.set_ylabel(metric)


def _draw_clients(axes, i: int, numbers: np.ndarray, colour: str) -> None:
    """One stage's column: a box when there is a distribution, points, the mean."""
    if numbers.size >= FEWEST_OF_A_BOX:
        _draw_box(axes, i, numbers, colour)
    # Spread by the golden ratio: even, and the same every time.
    offset = (np.arange(numbers.size) * 0.618034 % 1.0 - 0.5) * 0.36
    axes.plot(
        i + offset,
        numbers,
        "o",
        color=colour,
        markersize=3 if numbers.size > 20 else 5,
        markeredgewidth=0,
        alpha=min(0.5, max(0.05, 25 / numbers.size)),  # a crowd shows its density
        rasterized=numbers.size > 500,  # or the PDF would open slowly
    )
    mean = numbers.mean()
    axes.hlines(mean, i - 0.4, i + 0.4, color=colour, linestyle="--", zorder=3)


def _draw_box(axes, i: int, numbers: np.ndarray, colour: str) -> None:
    """Box and whiskers; matplotlib's own would load pyplot and choose a backend."""
    low, first, median, third, high = np.percentile(numbers, [5, 25, 50, 75, 95])
    line = {"color": colour, "zorder": 3}
    axes.hlines([first, third], i - 0.3, i + 0.3, **line)
    axes.hlines(median, i - 0.3, i + 0.3, linewidth=2.5, **line)
    axes.vlines([i - 0.3, i + 0.3], first, third, **line)
    axes.vlines([i, i], [low, third], [first, high], **line)
    axes.hlines([low, high], i - 0.15, i + 0.15, **line)
