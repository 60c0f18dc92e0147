"""The charts and images of a run as files, drawn by vl-convert."""

import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedfr_jax import mesh as meshes
from fedfr_jax.files import replace_file
from fedfr_jax.runs.evaluation_record import PICTURES, file_name
from fedfr_jax.runs.report.charts import Chart, side_by_side
from fedfr_jax.runs.report.run_charts import (
    Line,
    client_charts,
    curve_charts,
    partition_charts,
    rate_charts,
)
from fedfr_jax.runs.run_files import RunFiles
from fedfr_jax.runs.terminal import show
from fedfr_jax.types import Evaluation, ImageGrid

NO_PLOTS = "No plots: pip install 'fedfr_jax[report]' to have them."
SCALE = 2  # pixels of a .png for a pixel of the chart


def draw(
    evaluations: Mapping[str, Mapping[str, Evaluation]], folder: str | pathlib.Path
) -> list[pathlib.Path]:
    """Draw what the page of a run shows, and its images, in the first process.

    Charts become .svg, .png and .pdf: all curves in rounds, roc, det and other kinds
    of curves of all evaluators, EVALUATOR for one with numbers per client, partition.
    Images become .png in pictures/.

    Args:
      evaluations: {stage: {evaluator: Evaluation}}, for their images.
      folder: of the run, whose files have all numbers.

    Returns:
      The paths of the files; without vl-convert only those of images, after a message.
    """
    if not meshes.is_first_process():
        return []
    folder = pathlib.Path(folder)
    images, paths = _save_images(evaluations, folder / PICTURES), []
    try:
        for name, of_file in _by_file(RunFiles(folder)).items():
            paths += save(folder / name, of_file)
    except ImportError:
        show(NO_PLOTS)
    return paths + images


def _by_file(run: RunFiles) -> dict[str, list[Chart]]:
    """{file's name without ending: its charts}."""
    stages = run.stages.items()
    lines = [Line(name, x.rows, x.evaluations) for name, x in stages]
    order, files = [line.name for line in lines], {}
    if curves := curve_charts(lines, order)["main"]:
        files["rounds"] = curves
    others = rate_charts(lines, order) + client_charts(lines, order)
    for chart in others + partition_charts(run.partition):
        files.setdefault(file_name(chart.file), []).append(chart)
    return files


def save(path: str | pathlib.Path, of_file: Sequence[Chart]) -> list[pathlib.Path]:
    """Draw charts side by side as .svg, .png and .pdf; return the paths.

    Raises:
      ImportError: without the extra `report`.
    """
    import vl_convert

    svg = vl_convert.vegalite_to_svg(side_by_side(of_file))
    drawn = {
        ".svg": svg.encode(),
        ".png": vl_convert.svg_to_png(svg, scale=SCALE),
        ".pdf": vl_convert.svg_to_pdf(svg),
    }
    paths = []
    for ending, content in drawn.items():
        paths.append(pathlib.Path(f"{path}{ending}"))
        with replace_file(paths[-1]) as file:
            file.write(content)
    return paths


def _save_images(evaluations, folder: pathlib.Path) -> list[pathlib.Path]:
    """Write the grids of images, maps of all stages in the same colors."""
    from PIL import Image

    limits = color_limits(
        grid
        for of_stage in evaluations.values()
        for evaluation in of_stage.values()
        for grid in evaluation.image_grids.values()
    )
    paths = []
    for stage, of_stage in evaluations.items():
        for evaluator, evaluation in of_stage.items():
            for name, grid in evaluation.image_grids.items():
                path = folder / (file_name(f"{stage}_{evaluator}_{name}") + ".png")
                with replace_file(path) as file:
                    Image.fromarray(draw_grid(grid, limits)).save(file, "PNG")
                paths.append(path)
    return paths


LEAST, GAP, LINE = 160, 8, 18  # pixels: an image's side, between images, a line
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
    an image its caption, below all of them the legend.
    """
    from PIL import Image, ImageDraw, ImageFont

    columns = dict(grid.images)
    for name, values in grid.maps.items():
        low, high = limits[name]
        columns[f"{name}, {low:.2g} to {high:.2g}"] = colored(values, low, high)
    num_rows, height, width = next(iter(columns.values())).shape[:3]
    scale = max(1, -(-LEAST // max(width, height)))
    texts = (text for column in grid.captions.values() for text in column)
    caption = LINE * max((len(text.splitlines()) for text in texts), default=0)
    across, down = scale * width + GAP, scale * height + caption + GAP
    num_lines = -(-len(grid.legend) // len(columns))
    size = len(columns) * across + GAP, LINE + num_rows * down + LINE * num_lines + GAP
    paper = Image.new("RGB", size, PAPER)
    pen, font = ImageDraw.Draw(paper), ImageFont.load_default(12)
    for column, (name, images) in enumerate(columns.items()):
        left = GAP + column * across
        pen.text((left, 2), name, INK, font)
        for row, image in enumerate(images):
            picture = Image.fromarray(np.ascontiguousarray(image))
            picture = picture.resize(
                (scale * width, scale * height), Image.Resampling.NEAREST
            )
            paper.paste(picture, (left, LINE + row * down))
        for row, text in enumerate(grid.captions.get(name, ())):
            pen.text((left, LINE + (row + 1) * down - caption - GAP), text, INK, font)
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
