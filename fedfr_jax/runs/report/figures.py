"""Figures of plots: colors, axis limits, labels, saving.

Figures have their own canvas, without pyplot: no window, no global state, safe in a
thread. matplotlib is imported with the first figure.
"""

import math
import os
import pathlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from fedfr_jax.files import replace_file

# Okabe and Ito's colors, distinct for color-blind readers; dashes beyond eight.
_COLORS = (
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
_LEGEND_LETTER, _TITLE_LETTER, _CAPTION_LETTER = 0.085, 0.072, 0.075  # inches
Styles = Mapping[str, Mapping[str, str]]  # stage -> keywords of a matplotlib line


def styles(stages: Iterable[str]) -> dict[str, dict[str, str]]:
    """Color and dashes for each stage, the same in every plot of a run."""
    return {
        stage: {
            "color": _COLORS[i % len(_COLORS)],
            "linestyle": _DASHES[i // len(_COLORS) % len(_DASHES)],
        }
        for i, stage in enumerate(dict.fromkeys(stages))
    }


def limits(values: Sequence[float], *, is_rate: bool) -> tuple[float, float]:
    """Axis limits with a minimum span, so that a small change looks small.

    Rates get at least 0.1 of the way from 0 to 1, anything else at least a fifth of
    its largest value.
    """
    low, high = min(values), max(values)
    min_span = 0.1 if is_rate else 0.2 * max(abs(low), abs(high))
    span = 1.1 * (max(high - low, min_span) or 1.0)
    bottom = (low + high - span) / 2
    if is_rate:  # no empty axis beyond 0 and 1, only room for a marker
        room = 0.05 * span
        bottom = max(min(bottom, 1 + room - span), -room)
    return bottom, bottom + span


def are_rates(values: Iterable[float]) -> bool:
    """Whether all values lie in [0, 1]."""
    return all(0 <= value <= 1 for value in values)


def load_figure_class() -> type:
    """Import matplotlib's Figure, whatever backend the environment sets.

    A notebook hands MPLBACKEND to the commands that it starts, and matplotlib refuses
    to be imported with a backend that is not installed.
    """
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = "pip install 'fedfr_jax[plots]'"
        raise ImportError(f"Plots need matplotlib: {hint}.") from error
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    return Figure


def figure(width: float, height: float, names: Sequence[str] = ()):
    """Create a figure with plots of `width` inches, and a legend of `names`."""
    legend = 0.7 + _LEGEND_LETTER * max(map(len, names)) if names else 0.0
    return load_figure_class()(figsize=(width + legend, height), layout="constrained")


def panels(number: int, width: float, height: float, names: Sequence[str] = ()):
    """Create a figure with `number` axes of these inches, at most three in a row."""
    num_columns = 2 if number == 4 else min(number, 3)
    num_columns = max(1, min(num_columns, int(16 / width)))
    num_rows = math.ceil(number / num_columns)
    whole = figure(width * num_columns, height * num_rows, names)
    grid = whole.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axes in grid[number:]:
        axes.remove()
    return whole, list(grid[:number])


def set_title(axes, title: str, width: float) -> None:
    """Set a title over axes of `width` inches, wrapped to lines."""
    letters = int(width / _TITLE_LETTER)
    lines = [textwrap.fill(line, letters) for line in title.split("\n")]
    axes.set_title("\n".join(lines), fontsize=10)


def set_caption(figure, text: str) -> None:
    """Set a caption under a figure."""
    letters = int(figure.get_figwidth() / _CAPTION_LETTER)
    wrapped = textwrap.fill(text, letters)
    figure.supxlabel(wrapped, fontsize=8, color="0.3", x=0.01, ha="left")


def save(figure, path: str | os.PathLike) -> list[pathlib.Path]:
    """Save as .png and .pdf, with grid lines; return both paths."""
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return write(figure, path)


def write(figure, path: str | os.PathLike) -> list[pathlib.Path]:
    """Save as .png and .pdf, without changes; return both paths."""
    path = pathlib.Path(path)
    stem = path.stem if path.suffix in (".png", ".pdf") else path.name
    paths = [path.with_name(f"{stem}.png"), path.with_name(f"{stem}.pdf")]
    with replace_file(paths[0]) as file:
        figure.savefig(file, format="png", dpi=120)
    # Without the date, equal numbers give equal files.
    with replace_file(paths[1]) as file:
        metadata = {"CreationDate": None}
        figure.savefig(file, format="pdf", dpi=240, metadata=metadata)
    return paths
