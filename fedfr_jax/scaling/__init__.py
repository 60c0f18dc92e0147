"""Scaling laws: fits, confidence intervals, compute budgets, hold-out."""

from fedfr_jax.scaling.intervals import hold_out, interval, replicates
from fedfr_jax.scaling.laws import (
    JOINT,
    LAWS,
    POWER,
    SATURATING,
    Fit,
    Law,
    best_fit,
    fit,
    predict,
)
from fedfr_jax.scaling.report import as_json, markdown
from fedfr_jax.scaling.study import Study, study
from fedfr_jax.scaling.table import Points, points, read_rows

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
    "best_fit",
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
