"""Similarity thresholds of a model for a false accept rate.

They come from the run's evaluation on unseen identities, whose ROC is stored as JSON in
galleries and files of weights, or "" if there is none.
"""

import json
from collections.abc import Callable

import numpy as np

from fedfr_jax.evaluation.verification import Roc, threshold_at
from fedfr_jax.json_files import parse_json
from fedfr_jax.schema import naming

CURVE = "calibration"  # key in galleries and files of weights
DEFAULT_FAR = 1e-3


def curve_text(roc: Callable[[], Roc | None] | None) -> str:
    """Convert the ROC to JSON; "" without one."""
    curve = roc() if roc else None
    return "" if curve is None else json.dumps(curve.as_lists())


def parse_curve(text: str) -> Roc | None:
    """Read the ROC from JSON; None if the text is empty."""
    if not text:
        return None
    with naming(CURVE):
        fields = parse_json(text, CURVE)
        far, tar, thresholds = (
            np.asarray(fields[name], float) for name in ("far", "tar", "thresholds")
        )
        counts = np.int64(fields["num_negatives"]), np.int64(fields["num_positives"])
        return Roc(far, tar, *counts, thresholds)


def threshold(text: str, far: float | None) -> tuple[float, str]:
    """(lowest cosine threshold of a false accept rate, that rate in words).

    Args:
      far: None takes `DEFAULT_FAR`, or the smallest rate that the curve's pairs can
        measure where that one is larger.
    """
    curve = parse_curve(text)
    if curve is None:
        raise ValueError(
            "A model without the ROC of a run's evaluation needs --threshold."
        )
    if far is None and (smallest := curve.far[0]) > DEFAULT_FAR:
        source = (
            f"false accept rate {smallest:.3g}, the smallest that the "
            f"{curve.num_negatives:g} pairs of two people in the run's evaluation can "
            "measure"
        )
        return threshold_at(curve, smallest), source
    far = DEFAULT_FAR if far is None else far
    return threshold_at(curve, far), f"false accept rate {far:g}"
