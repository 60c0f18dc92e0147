"""Similarity thresholds of a model for a false accept rate.

They come from the run's evaluation on unseen identities: its ROC is stored with
galleries and weights as JSON, empty if there is none.
"""

import json
from collections.abc import Callable

import numpy as np

from fedfr_jax.evaluation.verification import Roc, threshold_at
from fedfr_jax.json_files import parse_json
from fedfr_jax.schema import naming

CURVE = "calibration"  # in galleries and files of weights
MAX_PAIRS = 1.01  # of a cosine, with its rounding


def curve_text(roc: Callable[[], Roc | None] | None) -> str:
    """Convert the ROC to JSON; "" without one."""
    found = roc() if roc else None
    return "" if found is None else json.dumps(found.as_lists())


def measure_curve(text: str) -> Roc | None:
    """Read the ROC from JSON; None if the text is empty."""
    if not text:
        return None
    with naming(CURVE):
        found = parse_json(text, CURVE).items()
        curve = Roc(**{k: np.asarray(v, float) for k, v in found})
        _check(curve)
    return curve


def _check(curve: Roc) -> None:
    points = {x.shape for x in (curve.far, curve.tar, curve.thresholds)}
    is_finite = all(np.isfinite(x).all() for x in curve)
    if len(points) != 1 or not is_finite or not curve.far.size:
        raise ValueError(f"{CURVE} must have finite rates and cosines, got {points}.")
    if np.abs(curve.thresholds).max() > MAX_PAIRS or (np.diff(curve.far) < 0).any():
        raise ValueError(
            f"{CURVE} must have cosines in [-1, 1] at ascending rates, got up to "
            f"{np.abs(curve.thresholds).max():g}."
        )


def threshold(text: str, far: float) -> float:
    """Lowest cosine threshold whose false accept rate does not exceed `far`."""
    curve = measure_curve(text)
    if curve is None:
        raise ValueError(
            "--threshold must be set, got none. The model has no ROC of a run's "
            "evaluation to choose it from."
        )
    return threshold_at(curve, far)
