"""Ranges of the numbers of a face method."""

import math
from collections.abc import Mapping
from typing import Any

from fedfr_jax.schema import BELOW_ONE, POSITIVE, check_ranges, has_kind

NOT_NEGATIVE, FRACTION, COSINE = (0, math.inf), (0, 1), (-1, 1)
BOUNDS = {
    "alpha": FRACTION,
    "branch_weight": NOT_NEGATIVE,
    "clip_norm": NOT_NEGATIVE,
    "contrastive_weight": NOT_NEGATIVE,
    "decay_epochs": NOT_NEGATIVE,
    "epochs": NOT_NEGATIVE,
    "groups": (1, math.inf),
    "learning_rate": NOT_NEGATIVE,
    "margin": NOT_NEGATIVE,
    "max_hard_negatives": NOT_NEGATIVE,
    "momentum": BELOW_ONE,
    "negative_weight": NOT_NEGATIVE,
    "num_clients": NOT_NEGATIVE,
    "positive_weight": FRACTION,
    "scale": POSITIVE,
    "spread": NOT_NEGATIVE,
    "spreadout": COSINE,
    "steps": NOT_NEGATIVE,
    "t": (1, math.inf),
    "contrastive_temperature": POSITIVE,
    "temperature": POSITIVE,
    "hard_negative_threshold": COSINE,
    "weight": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
}
WHOLE = ("decay_epochs", "epochs", "groups", "max_hard_negatives", "steps")
MAY_BE_NONE = ("spreadout", "hard_negative_threshold")


def check_numbers(prefix: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for the first of `options` that is out of its range, or a
    fraction where whole numbers are wanted.

    Args:
      prefix: goes before the names in the message, as in "adaptation.".
      options: those without a range are not looked at.
    """
    is_none = lambda name: options[name] is None and name in MAY_BE_NONE
    names = [name for name in options if name in BOUNDS and not is_none(name)]
    check_ranges(prefix, options, {name: BOUNDS[name] for name in names})
    for name in [name for name in names if name in WHOLE]:
        if not has_kind(int | tuple[int, ...], options[name]):
            raise ValueError(
                f"{prefix}{name} must be a whole number, got {options[name]!r}."
            )
