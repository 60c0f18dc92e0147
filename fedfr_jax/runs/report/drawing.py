"""All plots of a finished experiment."""

import pathlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fedfr_jax import mesh as meshes
from fedfr_jax.runs.evaluation_record import PICTURES, file_name
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
    facts: Mapping[str, Any] = MappingProxyType({}),
    say: Callable = print,
) -> list[pathlib.Path]:
    """Draw curves, clients, rounds and images, in the first process.

    Each plot is written as .png and .pdf: roc and det (roc_EVALUATOR when several
    evaluators have one), any other kind of curve by its name, EVALUATOR for one with
    numbers per client, rounds, partition; grids, and pictures as .png alone, go to
    pictures/.

    Args:
      evaluations: {stage: {evaluator: Evaluation}}, in the order of the legends.
      rows: {stage: rows of its metrics.jsonl}; a stage may be missing.
      folder: the folder to write to.
      facts: of the task's split; those with a table of classes are drawn.
      say: prints one line, without reading markup in it.

    Returns:
      The paths of the files; without matplotlib, which is said in one line, only
      those of images.
    """
    if not meshes.is_first_process():
        return []
    folder = pathlib.Path(folder)
    pictures = _save_images(evaluations, folder / PICTURES)
    try:
        figures.load_figure_class()  # asked for before any plot is written
    except ImportError:
        say(NO_PLOTS)
        return pictures
    styles = figures.styles([*evaluations, *rows])
    evaluators = list(dict.fromkeys(e for of in evaluations.values() for e in of))
    split = facts.get("table") and plot_partition(folder / "partition", facts)
    return [
        *(split or ()),
        *_draw_curves(evaluations, evaluators, folder, styles),
        *_draw_clients(evaluations, evaluators, folder, styles),
        *plot_rounds(
            folder / "rounds",
            rows,
            evaluators=evaluators,
            finals={stage: _final_evaluations(of) for stage, of in evaluations.items()},
            styles=styles,
        ),
        *pictures,
        *_draw_grids(evaluations, folder / PICTURES),
    ]


def _draw_curves(evaluations, evaluators, folder, styles) -> list[pathlib.Path]:
    """Draw a plot per kind of curve and evaluator; a ROC gives a DET, too."""
    found = {}
    for evaluator in evaluators:
        for stage, of in evaluations.items():
            curves = of[evaluator].curves if evaluator in of else {}
            for kind, curve in curves.items():
                found.setdefault((kind, evaluator), {})[stage] = curve
    kinds = [kind for kind, _ in found]
    paths = []
    for (kind, evaluator), curves in found.items():
        ending = f"_{evaluator}" if kinds.count(kind) > 1 else ""
        path = folder / file_name(kind + ending)
        given = {"evaluator": evaluator, "styles": styles}
        if kind == "roc":
            paths += plot_roc(path, curves, **given)
            paths += plot_det(folder / file_name("det" + ending), curves, **given)
        else:
            paths += plot_curve(path, curves, kind=kind, **given)
    return paths


def _draw_clients(evaluations, evaluators, folder, styles) -> list[pathlib.Path]:
    """Draw a plot per evaluator with values per client."""
    paths = []
    for evaluator in evaluators:
        values = {
            stage: of[evaluator].per_client
            for stage, of in evaluations.items()
            if evaluator in of and of[evaluator].per_client
        }
        if values:
            path = folder / file_name(evaluator)
            private = [stage for stage in values if "privacy" in evaluations[stage]]
            given = {"evaluator": evaluator, "styles": styles, "private": private}
            paths += plot_clients(path, values, **given)
    return paths


def _final_evaluations(of_stage: Mapping[str, Any]) -> dict[str, float]:
    return {
        f"{evaluator}/{name}": value
        for evaluator, evaluation in of_stage.items()
        for name, value in evaluation.metrics.items()
    }


def _save_images(evaluations, folder: pathlib.Path) -> list[pathlib.Path]:
    from PIL import Image

    paths = []
    for stage, of in evaluations.items():
        for evaluator, evaluation in of.items():
            for name, pixels in evaluation.images.items():
                folder.mkdir(parents=True, exist_ok=True)
                file = file_name(f"{stage}_{evaluator}_{name}") + ".png"
                Image.fromarray(pixels).save(folder / file)
                paths.append(folder / file)
    return paths


def _draw_grids(evaluations, folder: pathlib.Path) -> list[pathlib.Path]:
    """Draw a file per stage, evaluator and grid, all stages in the same colors."""
    found = {}
    for stage, of in evaluations.items():
        for evaluator, evaluation in of.items():
            for name, grid in evaluation.image_grids.items():
                found.setdefault((evaluator, name), {})[stage] = grid
    paths = []
    for (evaluator, name), grids in found.items():
        limits = color_limits(grids.values())
        for stage, grid in grids.items():
            path = folder / file_name(f"{stage}_{evaluator}_{name}")
            paths += plot_grid(path, grid, title=f"{stage}: {name}", limits=limits)
    return paths
