"""Who holds how much of which class, as a picture."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedfr_jax.runs.report import figures

MOST_NAMES = 30  # classes that are written out beside their row
MOST_NUMBERS = 150  # cells with their count in them
CROWD = 50  # clients from which they are sorted, as nobody looks for one by its number


def plot_partition(
    path: str | os.PathLike, facts: Mapping[str, Any]
) -> list[pathlib.Path]:
    """Training images of every client and class, above every client's total.

    Args:
      path: the file; it is written as .png and as .pdf.
      facts: of `class_report`; its table may be of the first clients only. "kind"
        says what its classes are, one and many, where that is another word.

    Returns:
      The paths of the files.

    Raises:
      ValueError: when the facts have no table of a client.
    """
    counts = np.array(facts.get("table", {}).get("train", ()))  # [n, M]
    if counts.ndim != 2 or not counts.size:
        raise ValueError(f"facts must have a table of clients, got {counts.shape}.")
    num_clients, num_classes = counts.shape
    is_crowd = num_clients > CROWD
    if is_crowd:
        counts = counts[np.lexsort((-counts.max(axis=1), counts.argmax(axis=1)))]
    width = min(max(5.0, 0.3 * num_clients), 11.0)
    height = min(max(2.5, 0.24 * num_classes), 7.0)
    figure = figures.figure(width, height + 1.6)
    shares = {"height_ratios": [height, 1.1]}
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw=shares)
    one, many = facts.get("kind", ("class", "classes"))
    image = _draw_classes(above, counts, facts["classes"], 0.5 if is_crowd else 1.0)
    above.set_ylabel(one)
    figure.colorbar(image, ax=above, label="training images", pad=0.01)
    _draw_totals(below, counts.sum(axis=1))
    order = f", sorted by their largest {one}" if is_crowd else ""
    below.set_xlabel(f"clients{order}")
    title = f"{facts['clients']} clients, {num_classes} {many}"
    if num_clients < facts["clients"]:
        title += f": the first {num_clients} clients"
    figures.set_title(above, title, width)
    return figures.save(figure, path)


def _draw_classes(axes, counts, names, power):
    """A row per class, a column per client; white for none, else colour by power."""
    from matplotlib.colors import PowerNorm

    image = axes.imshow(
        np.ma.masked_equal(counts.T, 0),
        aspect="auto",
        interpolation="nearest",
        cmap="viridis_r",
        norm=PowerNorm(power, vmin=0, vmax=counts.max()),
    )
    if (num_classes := counts.shape[1]) <= MOST_NAMES:
        axes.set_yticks(range(num_classes), names)
    if counts.size <= MOST_NUMBERS:
        half = counts.max() / 2
        for (client, label), count in np.ndenumerate(counts):
            colour = "white" if count > half else "black"
            given = {"ha": "center", "va": "center", "fontsize": 7}
            if count:
                axes.text(client, label, str(count), color=colour, **given)
    return image


def _draw_totals(axes, totals):
    """A bar per client."""
    places = np.arange(len(totals))
    axes.fill_between(
        np.append(places, len(totals)) - 0.5,
        np.append(totals, totals[-1]),
        step="post",
        linewidth=0,
    )
    axes.set(ylabel="images", ylim=(0, 1.05 * totals.max()))
    axes.xaxis.get_major_locator().set_params(integer=True)
