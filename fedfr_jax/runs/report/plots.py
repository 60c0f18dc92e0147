"""The plots of a run by their earlier names; `drawing.draw` draws all of them."""

import os
import pathlib
from collections.abc import Mapping, Sequence

from fedfr_jax.runs.report import rounds
from fedfr_jax.runs.report.clients import plot_clients
from fedfr_jax.runs.report.curves import plot_det, plot_roc

__all__ = ["plot_det", "plot_personalised", "plot_roc", "plot_rounds"]

plot_personalised = plot_clients


def plot_rounds(
    path: str | os.PathLike, rows: Mapping[str, rounds.Rows], metrics: Sequence[str]
) -> list[pathlib.Path]:
    """The loss, and the metrics of every evaluator that is named in `metrics`."""
    evaluators = {name.partition("/")[0] for name in metrics if "/" in name}
    return rounds.plot_rounds(path, rows, evaluators=evaluators)
