"""The charts and images of a run as files, drawn by vl-convert."""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fedfr_jax import manifest
from fedfr_jax import mesh as meshes
from fedfr_jax.files import replace_file
from fedfr_jax.runs.evaluation_record import PICTURES, RECORD, file_name
from fedfr_jax.runs.report.charts import Chart, side_by_side
from fedfr_jax.runs.report.grids import color_limits, draw_grid
from fedfr_jax.runs.report.run_charts import (
    Line,
    Rows,
    client_charts,
    curve_charts,
    partition_charts,
    rate_charts,
)
from fedfr_jax.types import Evaluation

NO_PLOTS = "No plots: pip install 'fedfr_jax[report]' to have them."
SCALE = 2  # pixels of a .png for a pixel of the chart


def draw(
    evaluations: Mapping[str, Mapping[str, Evaluation]],
    rows: Mapping[str, Rows],
    folder: str | pathlib.Path,
    *,
    data_report: Mapping[str, Any] = MappingProxyType({}),
    say: Callable = print,
) -> list[pathlib.Path]:
    """Draw what the page of a run shows, and its images, in the first process.

    Charts become .svg, .png and .pdf: all curves in rounds, roc, det and other kinds
    of curves of all evaluators, EVALUATOR for one with numbers per client, partition.
    Images become .png in pictures/.

    Args:
      evaluations: {stage: {evaluator: Evaluation}}, in the order of the legends. Their
        numbers are read from the stages' evaluation.json.
      rows: {stage: rows of its metrics.jsonl}; a stage may be missing.
      data_report: of the task's split.
      say: prints one line, without reading markup in it.

    Returns:
      The paths of the files; without vl-convert only those of images, after a message.
    """
    if not meshes.is_first_process():
        return []
    folder = pathlib.Path(folder)
    images = _save_images(evaluations, folder / PICTURES)
    lines = [
        Line(stage, rows.get(stage, ()), _record(folder / stage))
        for stage in dict.fromkeys([*evaluations, *rows])
    ]
    order = [line.name for line in lines]
    try:
        paths = []
        for name, of_file in _by_file(lines, order, data_report).items():
            paths += save(folder / name, of_file)
    except ImportError:
        say(NO_PLOTS)
        return images
    return paths + images


def _record(folder: pathlib.Path) -> dict[str, Any]:
    """A stage's evaluation.json; {} if it has none."""
    try:
        return json.loads(manifest.read_bytes(folder / RECORD))
    except FileNotFoundError:
        return {}


def _by_file(lines, order, data_report) -> dict[str, list[Chart]]:
    """{file's name without ending: its charts}."""
    files = {}
    if curves := curve_charts(lines, order)["main"]:
        files["rounds"] = curves
    others = rate_charts(lines, order) + client_charts(lines, order)
    for chart in others + partition_charts(data_report):
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
    """Write the images and grids of images, maps of all stages in the same colors."""
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
            grids = evaluation.image_grids
            drawn = {name: draw_grid(grid, limits) for name, grid in grids.items()}
            for name, pixels in {**evaluation.images, **drawn}.items():
                path = folder / (file_name(f"{stage}_{evaluator}_{name}") + ".png")
                with replace_file(path) as file:
                    Image.fromarray(pixels).save(file, "PNG")
                paths.append(path)
    return paths
