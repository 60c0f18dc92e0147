"""Plots over clients: distributions of metrics, and classes per client."""

import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from fedfr_jax.metric_names import panel_title
from fedfr_jax.runs.report import figures

MAX_METRICS = 4
MIN_BOX_SIZE = 5  # clients from which quartiles are drawn


def plot_clients(
    path: str | os.PathLike,
    values: Mapping[str, Mapping[str, Sequence]],
    *,
    evaluator: str = "personalized",
    styles: figures.Styles | None = None,
    private: Collection[str] = (),
) -> list[pathlib.Path]:
    """Plot box, points and mean of each metric over the clients, a panel per metric.

    Args:
      path: the file; it is written as .png and as .pdf.
      values: stage -> metric -> [N] one number per client; what is not finite is left
        out, and so are metrics after the fourth.
      evaluator: of these numbers, for the title.
      styles: stage -> keywords of its line.
      private: stages trained with differential privacy, which does not cover these
        numbers.
    """
    metrics = list(dict.fromkeys(m for x in values.values() for m in x))
    shown, styles = metrics[:MAX_METRICS], styles or figures.styles(values)
    width = max(3.6, 0.8 + 0.6 * len(values))
    figure, panels = figures.panels(len(shown), width, 4.2)
    for axes, metric in zip(panels, shown, strict=True):
        columns = {s: _finite(values[s].get(metric, ())) for s in values}
        _draw_metric(axes, metric, columns, styles)
        figures.set_title(axes, panel_title(evaluator, metric), width - 0.6)
    note = "A point per client; dashed: mean"
    columns = [x.get(metric, ()) for x in values.values() for metric in shown]
    if max(len(_finite(column)) for column in columns) >= MIN_BOX_SIZE:
        note += "; box: median and quartiles; whiskers: 5th and 95th percentile"
    note += "."
    if len(metrics) > len(shown):
        note += f" The first {len(shown)} of {len(metrics)} metrics."
    if private:
        note += f" Not private, though training is: {', '.join(private)}."
    figures.set_caption(figure, note)
    return figures.save(figure, path)


def _finite(values: Sequence) -> np.ndarray:
    numbers = np.asarray(values, np.float64)
    return numbers[np.isfinite(numbers)]


def _draw_metric(axes, metric: str, columns: Mapping[str, np.ndarray], styles) -> None:
    """Draw one panel: the columns of all stages."""
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


def _draw_clients(axes, i: int, numbers: np.ndarray, color: str) -> None:
    """Draw one stage's column: a box if there are enough clients, points, the mean."""
    if numbers.size >= MIN_BOX_SIZE:
        _draw_box(axes, i, numbers, color)
    # Spread by the golden ratio: even, and the same every time.
    offset = (np.arange(numbers.size) * 0.618034 % 1.0 - 0.5) * 0.36
    axes.plot(
        i + offset,
        numbers,
        "o",
        color=color,
        markersize=3 if numbers.size > 20 else 5,
        markeredgewidth=0,
        alpha=min(0.5, max(0.05, 25 / numbers.size)),  # a crowd shows its density
        rasterized=numbers.size > 500,  # or the PDF would open slowly
    )
    mean = numbers.mean()
    axes.hlines(mean, i - 0.4, i + 0.4, color=color, linestyle="--", zorder=3)


def _draw_box(axes, i: int, numbers: np.ndarray, color: str) -> None:
    """Draw box and whiskers, without pyplot."""
    low, first, median, third, high = np.percentile(numbers, [5, 25, 50, 75, 95])
    line = {"color": color, "zorder": 3}
    axes.hlines([first, third], i - 0.3, i + 0.3, **line)
    axes.hlines(median, i - 0.3, i + 0.3, linewidth=2.5, **line)
    axes.vlines([i - 0.3, i + 0.3], first, third, **line)
    axes.vlines([i, i], [low, third], [first, high], **line)
    axes.hlines([low, high], i - 0.15, i + 0.15, **line)


MAX_NAMES = 30  # classes whose names are written
MAX_NUMBERS = 150  # cells whose counts are written
CROWD = 50  # clients from which they are sorted: too many to look one up by its number


def plot_partition(
    path: str | os.PathLike, data_report: Mapping[str, Any]
) -> list[pathlib.Path]:
    """Plot the training images of every client and class, above the clients' totals.

    Args:
      path: the file; it is written as .png and as .pdf.
      data_report: of `class_report`; its table may be of the first clients only. "kind"
        is the (singular, plural) of its classes, if they are called otherwise.
    """
    counts = np.array(data_report["table"]["train"])  # [n, M]
    num_clients, num_classes = counts.shape
    is_crowd = num_clients > CROWD
    if is_crowd:
        counts = counts[np.lexsort((-counts.max(axis=1), counts.argmax(axis=1)))]
    width = min(max(5.0, 0.3 * num_clients), 11.0)
    height = min(max(2.5, 0.24 * num_classes), 7.0)
    figure = figures.figure(width, height + 1.6)
    shares = {"height_ratios": [height, 1.1]}
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw=shares)
    class_word, classes_word = data_report.get("kind", ("class", "classes"))
    power = 0.5 if is_crowd else 1.0
    image = _draw_classes(above, counts, data_report["classes"], power)
    above.set_ylabel(class_word)
    figure.colorbar(image, ax=above, label="training images", pad=0.01)
    _draw_totals(below, counts.sum(axis=1))
    order = f", sorted by their largest {class_word}" if is_crowd else ""
    below.set_xlabel(f"clients{order}")
    title = f"{data_report['clients']} clients, {num_classes} {classes_word}"
    if num_clients < data_report["clients"]:
        title += f": the first {num_clients} clients"
    figures.set_title(above, title, width)
    return figures.save(figure, path)


def _draw_classes(axes, counts, names, power):
    """Draw a row per class, a column per client; 0 is white.

    Args:
      power: exponent of the color scale.
    """
    from matplotlib.colors import PowerNorm

    image = axes.imshow(
        np.ma.masked_equal(counts.T, 0),
        aspect="auto",
        interpolation="nearest",
        cmap="viridis_r",
        norm=PowerNorm(power, vmin=0, vmax=counts.max()),
    )
    if (num_classes := counts.shape[1]) <= MAX_NAMES:
        axes.set_yticks(range(num_classes), names)
    if counts.size <= MAX_NUMBERS:
        half = counts.max() / 2
        for (client, label), count in np.ndenumerate(counts):
            color = "white" if count > half else "black"
            text_style = {"ha": "center", "va": "center", "fontsize": 7}
            if count:
                axes.text(client, label, str(count), color=color, **text_style)
    return image


def _draw_totals(axes, totals):
    """Draw a bar per client."""
    places = np.arange(len(totals))
    axes.fill_between(
        np.append(places, len(totals)) - 0.5,
        np.append(totals, totals[-1]),
        step="post",
        linewidth=0,
    )
    axes.set(ylabel="images", ylim=(0, 1.05 * totals.max()))
    axes.xaxis.get_major_locator().set_params(integer=True)
