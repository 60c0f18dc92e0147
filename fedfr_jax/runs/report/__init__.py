"""What a run shows when it is over: the result table and the plots."""

from fedfr_jax.runs.report.plots import (
    plot_det,
    plot_personalised,
    plot_roc,
    plot_rounds,
)
from fedfr_jax.runs.report.tables import markdown_table, plain_table, result_table

__all__ = [
    "markdown_table",
    "plain_table",
    "plot_det",
    "plot_personalised",
    "plot_roc",
    "plot_rounds",
    "result_table",
]
