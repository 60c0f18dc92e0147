"""Plots of curves, a line per stage: ROC, DET and others.

An error rate of few pairs is mostly chance: where fewer than ten errors are counted the
line is faint, and it ends where there would be less than one.
"""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedfr_jax.metric_names import panel_title
from fedfr_jax.runs.report import figures

MIN_POINTS = 10  # counted pairs from which a rate is drawn solid


class _Rates(NamedTuple):
    """A ROC sorted by far; counts are infinite if unknown."""

    far: np.ndarray  # [P] in (0, 1]
    tar: np.ndarray  # [P] in [0, 1]
    num_negatives: float
    num_positives: float


def plot_roc(
    path: str | os.PathLike,
    curves: Mapping[str, Any],
    *,
    evaluator: str = "generic",
    styles: figures.Styles | None = None,
) -> list[pathlib.Path]:
    """Plot the ROC, true over false accept rate, a line per stage.

    Args:
      path: the file; it is written as .png and as .pdf.
      curves: stage -> (far [P], tar [P], num_negatives, num_positives), or only the
        first two. Points with less than one false accept are left out: they have no
        place on the logarithmic axis, or are not measured.
      evaluator: of these curves, for the title.
      styles: stage -> keywords of its line.
    """
    rates, styles = _read(curves), styles or figures.styles(curves)
    figure = figures.figure(6.4, 4.8, list(rates))
    axes = figure.subplots()
    for stage, roc in rates.items():
        is_solid = roc.far * roc.num_negatives >= MIN_POINTS
        _draw(axes, roc.far, roc.tar, is_solid, stage, styles[stage])
    axes.set(ylim=(0.0, 1.02), ylabel="true accept rate")
    title = panel_title(evaluator, "true accept rate over false accept rate (ROC)")
    return _save(figure, path, rates, title)


def plot_det(
    path: str | os.PathLike,
    curves: Mapping[str, Any],
    *,
    evaluator: str = "generic",
    styles: figures.Styles | None = None,
) -> list[pathlib.Path]:
    """Plot the DET, false reject over false accept rate on log axes, a line per stage.

    The error rates that are close to 1 on a ROC are distinct here. Arguments and
    errors are those of `plot_roc`; points without a false reject are left out, too.
    """
    rates, styles = _read(curves), styles or figures.styles(curves)
    names = {stage: _name_of_errors(stage, roc) for stage, roc in rates.items()}
    figure = figures.figure(6.4, 4.8, list(names.values()))
    axes = figure.subplots()
    lowest = 0.1
    for stage, roc in rates.items():
        rejected = np.where(roc.tar < 1, 1 - roc.tar, np.nan)
        is_solid = roc.far * roc.num_negatives >= MIN_POINTS
        is_solid &= rejected * roc.num_positives >= MIN_POINTS
        _draw(axes, roc.far, rejected, is_solid, names[stage], styles[stage])
        lowest = min(lowest, float(np.nanmin(rejected, initial=1.0)))
    axes.plot([1e-12, 1], [1e-12, 1], color="0.6", linestyle=":", linewidth=1)
    axes.set(yscale="log", ylim=(0.8 * lowest, 1.0), ylabel="false reject rate")
    title = panel_title(evaluator, "false reject rate over false accept rate (DET)")
    return _save(figure, path, rates, title, "Dotted: both rates are equal. ")


def plot_curve(
    path: str | os.PathLike,
    curves: Mapping[str, tuple[Sequence, Sequence]],
    *,
    kind: str,
    evaluator: str,
    styles: figures.Styles | None = None,
) -> list[pathlib.Path]:
    """Plot curves of any other kind on linear axes, a line per stage.

    Args:
      curves: stage -> (x [P], y [P], ...); the names of a NamedTuple's first two
        fields become the names of the axes.
    """
    styles = styles or figures.styles(curves)
    figure = figures.figure(6.4, 4.8, list(curves))
    axes = figure.subplots()
    for stage, curve in curves.items():
        axes.plot(curve[0], curve[1], label=stage, **styles[stage])
        if hasattr(curve, "_fields"):
            x, y = curve._fields[:2]
            axes.set(xlabel=x.replace("_", " "), ylabel=y.replace("_", " "))
    figures.set_title(axes, panel_title(evaluator, kind), 6.4)
    figure.legend(loc="outside right upper")
    return figures.save(figure, path)


def _read(curves: Mapping[str, Any]) -> dict[str, _Rates]:
    """Measured points of each curve, sorted by far."""
    rates = {}
    for stage, (far, tar, *counts) in curves.items():
        far, tar = np.asarray(far, np.float64), np.asarray(tar, np.float64)
        num_negatives, num_positives = counts[:2] or (np.inf, np.inf)
        order = np.argsort(far, kind="stable")
        # Rounding must not lose the point at one false accept.
        order = order[far[order] * (1 + 1e-6) >= 1 / num_negatives]
        order = order[far[order] > 0]
        if not order.size:
            raise ValueError(f"curves[{stage!r}] must have a far > 0, got {far}.")
        rates[stage] = _Rates(far[order], tar[order], num_negatives, num_positives)
    return rates


def _draw(axes, x, y, is_solid, name: str, style: Mapping[str, str]) -> None:
    """Draw a line that is faint where `is_solid` is False."""
    axes.plot(x, y, alpha=0.3, linewidth=1, **style)
    axes.plot(x, np.where(is_solid, y, np.nan), label=name, linewidth=1.8, **style)


def _name_of_errors(stage: str, rates: _Rates) -> str:
    """Label of a DET line, marked if there is no false reject to draw."""
    return stage if np.any(rates.tar < 1) else f"{stage} (no false reject)"


def _save(figure, path, rates: dict[str, _Rates], title: str, note: str = ""):
    """Finish a plot over false accept rates, and save it."""
    axes = figure.axes[0]
    lowest = min(roc.far[0] for roc in rates.values())
    axes.set(xscale="log", xlim=(min(lowest, 0.5), 1.0), xlabel="false accept rate")
    figures.set_title(axes, title, 6.4)
    # Inside, it would cover the curves of poor or of many stages.
    figure.legend(loc="outside right upper")
    negatives = min(roc.num_negatives for roc in rates.values())
    if np.isfinite(negatives):
        positives = min(roc.num_positives for roc in rates.values())
        note += (
            f"{positives:,} positive and {negatives:,} negative pairs. Faint: fewer "
            f"than {MIN_POINTS} wrong pairs counted, mostly chance. Nothing is "
            f"measured below one false accept, a rate of {1 / negatives:.1e}."
        )
    if note:
        figures.set_caption(figure, note)
    return figures.save(figure, path)
