"""Scaling laws: fitted to a table of runs, with intervals, budgets and a hold-out."""

from fedfr_jax.scaling.fit import Fit, best, fit
from fedfr_jax.scaling.intervals import hold_out, interval, replicates
from fedfr_jax.scaling.laws import JOINT, LAWS, POWER, SATURATING, Law, predict
from fedfr_jax.scaling.study import Study, study
from fedfr_jax.scaling.table import Points, points, read_rows
from fedfr_jax.scaling.tell import as_json, markdown

__all__ = [
    "JOINT",
    "LAWS",
    "POWER",
    "SATURATING",
    "Fit",
    "Law",
    "Points",
    "Study",
    "as_json",
    "best",
    "fit",
    "hold_out",
    "interval",
    "markdown",
    "points",
    "predict",
    "read_rows",
    "replicates",
    "study",
]
