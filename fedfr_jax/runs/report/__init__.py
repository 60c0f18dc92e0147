"""Reports of runs: the result table and the plots."""

from fedfr_jax.runs.report.clients import plot_clients, plot_partition
from fedfr_jax.runs.report.curves import plot_curve, plot_det, plot_roc
from fedfr_jax.runs.report.drawing import draw
from fedfr_jax.runs.report.grids import plot_grid
from fedfr_jax.runs.report.rounds import plot_rounds
from fedfr_jax.runs.report.tables import best_value, result_table

__all__ = [
    "best_value",
    "draw",
    "plot_clients",
    "plot_curve",
    "plot_det",
    "plot_grid",
    "plot_roc",
    "plot_partition",
    "plot_rounds",
    "result_table",
]
