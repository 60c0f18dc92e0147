"""All plots of a finished experiment."""

import pathlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fedfr_jax import mesh as meshes
from fedfr_jax.files import replace_file
from fedfr_jax.runs.evaluation_record import PICTURES, file_name, with_prefix
from fedfr_jax.runs.report import figures
from fedfr_jax.runs.report.clients import plot_clients, plot_partition
from fedfr_jax.runs.report.curves import plot_curve, plot_det, plot_roc
from fedfr_jax.runs.report.grids import color_limits, plot_grid
from fedfr_jax.runs.report.rounds import Rows, plot_rounds

NO_PLOTS = "No plots: pip install 'fedfr_jax[plots]' to have them."
Evaluations = Mapping[str, Mapping[str, Any]]  # stage -> evaluator -> Evaluation


def draw(
    evaluations: Evaluations,
    rows: Mapping[str, Rows],
    folder: str | pathlib.Path,
    *,
    data_report: Mapping[str, Any] = MappingProxyType({}),
    say: Callable = print,
) -> list[pathlib.Path]:
    """Draw curves, clients, rounds and images, in the first process.

    Each plot is written as .png and .pdf: roc and det (roc_EVALUATOR when several
    evaluators have one), any other kind of curve by its name, EVALUATOR for one with
    numbers per client, rounds, partition; grids, and images as .png alone, go to
    pictures/.

    Args:
      evaluations: {stage: {evaluator: Evaluation}}, in the order of the legends.
      rows: {stage: rows of its metrics.jsonl}; a stage may be missing.
      folder: the folder to write to.
      data_report: of the task's split; drawn if it has a table of classes.
      say: prints one line, without reading markup in it.

    Returns:
      The paths of the files; without matplotlib only those of images, after a message.
    """
    if not meshes.is_first_process():
        return []
    folder = pathlib.Path(folder)
    images = _save_images(evaluations, folder / PICTURES)
    try:
        figures.load_figure_class()  # asked for before any plot is written
    except ImportError:
        say(NO_PLOTS)
        return images
    styles = figures.styles([*evaluations, *rows])
    evaluators = list(dict.fromkeys(e for x in evaluations.values() for e in x))
    paths = []
    if data_report.get("table"):
        paths += plot_partition(folder / "partition", data_report)
    paths += _draw_curves(evaluations, evaluators, folder, styles)
    paths += _draw_clients(evaluations, evaluators, folder, styles)
    paths += plot_rounds(
        folder / "rounds",
        rows,
        evaluators=evaluators,
        finals={k: with_prefix(x) for k, x in evaluations.items()},
        styles=styles,
    )
    return paths + images + _draw_grids(evaluations, folder / PICTURES)


def _draw_curves(evaluations, evaluators, folder, styles) -> list[pathlib.Path]:
    """Draw a plot per kind of curve and evaluator; a ROC gives a DET, too."""
    curves_by_kind = {}
    for evaluator in evaluators:
        for stage, of_stage in evaluations.items():
            curves = of_stage[evaluator].curves if evaluator in of_stage else {}
            for kind, curve in curves.items():
                curves_by_kind.setdefault((kind, evaluator), {})[stage] = curve
    kinds = [kind for kind, _ in curves_by_kind]
    paths = []
    for (kind, evaluator), curves in curves_by_kind.items():
        ending = f"_{evaluator}" if kinds.count(kind) > 1 else ""
        path = folder / file_name(kind + ending)
        options = {"evaluator": evaluator, "styles": styles}
        if kind == "roc":
            paths += plot_roc(path, curves, **options)
            paths += plot_det(folder / file_name("det" + ending), curves, **options)
        else:
            paths += plot_curve(path, curves, kind=kind, **options)
    return paths


def _draw_clients(evaluations, evaluators, folder, styles) -> list[pathlib.Path]:
    """Draw a plot per evaluator with values per client."""
    paths = []
    for evaluator in evaluators:
        values = {
            stage: of_stage[evaluator].per_client
            for stage, of_stage in evaluations.items()
            if evaluator in of_stage and of_stage[evaluator].per_client
        }
        if values:
            path = folder / file_name(evaluator)
            private = [stage for stage in values if "privacy" in evaluations[stage]]
            options = {"evaluator": evaluator, "styles": styles, "private": private}
            paths += plot_clients(path, values, **options)
    return paths


def _save_images(evaluations, folder: pathlib.Path) -> list[pathlib.Path]:
    from PIL import Image

    paths = []
    for stage, of_stage in evaluations.items():
        for evaluator, evaluation in of_stage.items():
            for name, pixels in evaluation.images.items():
                path = folder / (file_name(f"{stage}_{evaluator}_{name}") + ".png")
                with replace_file(path) as file:
                    Image.fromarray(pixels).save(file, "PNG")
                paths.append(path)
    return paths


def _draw_grids(evaluations, folder: pathlib.Path) -> list[pathlib.Path]:
    """Draw a file per stage, evaluator and grid, all stages in the same colors."""
    grids_by_name = {}
    for stage, of_stage in evaluations.items():
        for evaluator, evaluation in of_stage.items():
            for name, grid in evaluation.image_grids.items():
                grids_by_name.setdefault((evaluator, name), {})[stage] = grid
    paths = []
    for (evaluator, name), grids in grids_by_name.items():
        limits = color_limits(grids.values())
        for stage, grid in grids.items():
            path = folder / file_name(f"{stage}_{evaluator}_{name}")
            paths += plot_grid(path, grid, title=f"{stage}: {name}", limits=limits)
    return paths
