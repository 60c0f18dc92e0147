"""From which cosine two pictures count as one person, for a false accept rate.

A run's own evaluation tells it, on people that no training saw: its curve goes along
with galleries and weights as JSON, empty where there is none.
"""

import json
from collections.abc import Callable

import numpy as np

from fedfr_jax.evaluation.verification import Roc, threshold_at


def text_of(roc: Callable[[], Roc | None] | None) -> str:
    """The curve as JSON."""
    found = roc() if roc else None
    if found is None:
        return ""
    return json.dumps({k: np.asarray(v).tolist() for k, v in found._asdict().items()})


def curve_of(text: str) -> Roc | None:
    """The curve out of JSON."""
    if not text:
        return None
    return Roc(**{k: np.asarray(v) for k, v in json.loads(text).items()})


def threshold(text: str, far: float) -> float:
    """The loosest cosine whose false accept rate does not exceed `far`.

    Raises:
      ValueError: without a curve, or for a rate that its pairs cannot tell.
    """
    curve = curve_of(text)
    if curve is None:
        raise ValueError(
            "--threshold must be given, got none: the network comes without the curve "
            "of a run's evaluation."
        )
    return threshold_at(curve, far)
