"""Scaling laws: fits, confidence intervals, compute budgets, hold-out."""

from fedfr_jax.scaling.laws import POWER, fit, predict
from fedfr_jax.scaling.report import as_json, markdown
from fedfr_jax.scaling.study import Study, study
from fedfr_jax.scaling.table import Points, points, read_rows

__all__ = ["POWER", "Points", "Study", "as_json", "fit", "markdown", "points"]
__all__ += ["predict", "read_rows", "study"]
