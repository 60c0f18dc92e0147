"""Image grids: a row per example, a column per kind."""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from fedfr_jax.types import ImageGrid

LEAST, GAP, LINE = 160, 8, 18  # pixels: an image's width, between images, a line
PAPER, INK = (255, 255, 255), (30, 30, 30)
# Colors of a map from its least to its largest value, dark to light.
COLORS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
Limits = Mapping[str, tuple[float, float]]  # map -> (minimum, maximum)


def color_limits(grids: Iterable[ImageGrid]) -> Limits:
    """(minimum, maximum) of each map over all grids."""
    limits = {}
    for grid in grids:
        for name, values in grid.maps.items():
            low, high = limits.get(name, (math.inf, -math.inf))
            limits[name] = min(low, values.min()), max(high, values.max())
    return limits


def draw_grid(grid: ImageGrid, limits: Limits) -> np.ndarray:
    """Draw a grid on white, uint8 [height, width, 3].

    Above each column stands its title, of a map with the limits of its colors; below
    all of them the legend.
    """
    from PIL import Image, ImageDraw, ImageFont

    columns = dict(grid.images)
    for name, values in grid.maps.items():
        low, high = limits[name]
        columns[f"{name}, {low:.2g} to {high:.2g}"] = colored(values, low, high)
    num_rows, height, width = next(iter(columns.values())).shape[:3]
    scale = max(1, -(-LEAST // width))
    across, down = scale * width + GAP, scale * height + GAP
    num_lines = -(-len(grid.legend) // len(columns))
    size = len(columns) * across + GAP, LINE + num_rows * down + LINE * num_lines + GAP
    paper = Image.new("RGB", size, PAPER)
    pen, font = ImageDraw.Draw(paper), ImageFont.load_default(12)
    for column, (name, images) in enumerate(columns.items()):
        left = GAP + column * across
        pen.text((left, 2), name, INK, font)
        for row, image in enumerate(images):
            picture = Image.fromarray(np.ascontiguousarray(image))
            picture = picture.resize((scale * width, scale * height), Image.NEAREST)
            paper.paste(picture, (left, LINE + row * down))
    for i, (name, color) in enumerate(grid.legend.items()):
        left = GAP + i % len(columns) * across
        top = LINE + num_rows * down + i // len(columns) * LINE
        pen.rectangle((left, top + 2, left + 12, top + 14), tuple(color), INK)
        pen.text((left + 18, top), name, INK, font)
    return np.asarray(paper)


def colored(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Colors of a map, uint8 [..., 3]; the least and the largest value are the ends."""
    place = (values - low) / ((high - low) or 1) * (len(COLORS) - 1)
    steps = range(len(COLORS))
    channels = [np.interp(place, steps, ends) for ends in zip(*COLORS, strict=True)]
    return np.stack(channels, axis=-1).astype(np.uint8)
