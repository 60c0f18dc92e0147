"""Image grids: a row per example, a column per kind."""

import math
import os
import pathlib
from collections.abc import Iterable, Mapping

from fedfr_jax.runs.report import figures
from fedfr_jax.types import ImageGrid

SIDE = 2.6  # inches of an image's width
LEGEND = 0.25  # inches of a line of the legend
Limits = Mapping[str, tuple[float, float]]  # map -> (minimum, maximum)


def plot_grid(
    path: str | os.PathLike,
    grid: ImageGrid,
    *,
    title: str,
    limits: Limits | None = None,
) -> list[pathlib.Path]:
    """Draw a grid as .png and .pdf; each map has a color bar below.

    Args:
      limits: as of `color_limits`, for several grids in the same colors.
    """
    columns, limits = {**grid.images, **grid.maps}, limits or color_limits([grid])
    figure, axes = _open(columns, num_lines=-(-len(grid.legend) // len(columns)))
    for column, (name, images) in enumerate(columns.items()):
        low, high = limits.get(name, (None, None))
        axes[0, column].set_title(name, fontsize=10)
        for row, image in enumerate(images):
            colored = axes[row, column].imshow(image, vmin=low, vmax=high)
            axes[row, column].set_axis_off()
        if name in grid.maps:
            bar = {"location": "bottom", "shrink": 0.9, "pad": 0.02, "aspect": 30}
            figure.colorbar(colored, ax=axes[:, column], **bar)
    figure.suptitle(title)
    _add_legend(figure, grid.legend, len(columns))
    return figures.write(figure, path)


def color_limits(grids: Iterable[ImageGrid]) -> Limits:
    """(minimum, maximum) of each map over all grids."""
    limits = {}
    for grid in grids:
        for name, values in grid.maps.items():
            low, high = limits.get(name, (math.inf, -math.inf))
            limits[name] = min(low, values.min()), max(high, values.max())
    return limits


def _open(columns, num_lines: int):
    """Create a figure with room for a legend, and its axes [rows, columns]."""
    images = next(iter(columns.values()))
    num_rows, height, width = images.shape[:3]
    figure = figures.figure(
        SIDE * len(columns), SIDE * num_rows * height / width + LEGEND * num_lines + 1
    )
    return figure, figure.subplots(num_rows, len(columns), squeeze=False)


def _add_legend(figure, legend, num_columns: int) -> None:
    """Add a legend with a color patch for every name."""
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=[x / 255 for x in color], edgecolor="0.3", label=name)
        for name, color in legend.items()
    ]
    if handles:
        style = {"loc": "outside lower center", "frameon": False, "fontsize": 9}
        figure.legend(handles=handles, ncols=num_columns + 1, **style)
