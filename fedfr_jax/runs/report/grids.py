"""Pictures side by side: a row per example, a column per kind, with a legend."""

import os
import pathlib

from fedfr_jax.runs.report import figures
from fedfr_jax.types import Grid

SIDE = 2.6  # inches of a picture's width
LEGEND = 0.25  # inches of a line of the legend


def plot_grid(path: str | os.PathLike, grid: Grid, *, title: str) -> pathlib.Path:
    """Draw a grid as .png; each map of numbers has a bar of its colours below.

    Raises:
      ValueError: without a picture, or for columns of different numbers of rows.
    """
    columns = {**grid.pictures, **{name: x for name, (x, _) in grid.maps.items()}}
    sizes = {name: len(images) for name, images in columns.items()}
    if len(set(sizes.values())) != 1 or not min(sizes.values()):
        raise ValueError(
            f"columns must have one number of pictures, at least 1, got {sizes}."
        )
    num_rows, (height, width) = next(iter(sizes.values())), _size(columns)
    num_lines = -(-len(grid.legend) // len(columns))
    figure = figures.figure(
        SIDE * len(columns),
        SIDE * num_rows * height / width + LEGEND * num_lines + 1,
    )
    axes = figure.subplots(num_rows, len(columns), squeeze=False)
    for column, (name, images) in enumerate(columns.items()):
        highest = grid.maps[name][1] if name in grid.maps else None
        shown = [
            axes[row, column].imshow(images[row], vmin=0, vmax=highest)
            for row in range(num_rows)
        ]
        axes[0, column].set_title(name, fontsize=10)
        if highest is not None:
            bar = {"location": "bottom", "shrink": 0.9, "pad": 0.02, "aspect": 30}
            figure.colorbar(shown[-1], ax=axes[:, column], **bar)
    for one in axes.ravel():
        one.set_axis_off()
    figure.suptitle(title)
    _add_legend(figure, grid.legend, len(columns))
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _size(columns):
    """(H, W) of the first picture."""
    return next(iter(columns.values())).shape[1:3]


def _add_legend(figure, legend, num_columns: int) -> None:
    """A patch of its colour for every name."""
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=[x / 255 for x in colour], edgecolor="0.3", label=name)
        for name, colour in legend.items()
    ]
    if handles:
        place = {"loc": "outside lower center", "frameon": False, "fontsize": 9}
        figure.legend(handles=handles, ncols=num_columns + 1, **place)
