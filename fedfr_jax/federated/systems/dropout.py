"""Dropout: clients of a cohort that leave a round, before they train or after.

Who leaves before has done nothing. Who leaves after has trained, so that its personal
state moves on, but its update is lost: the server never learns of it. Both have seen
what the server makes for the cohort before a round (`Algorithm.prepare`).
"""

from typing import NamedTuple

import numpy as np

from fedfr_jax.ranges import BelowOne
from fedfr_jax.types import Participation


class Dropout(NamedTuple):
    """How probable it is that a client leaves a round, each client on its own."""

    before_training: BelowOne = 0.0  # in [0, 1)
    after_training: BelowOne = 0.0  # in [0, 1), of those that have trained


def drop_clients(
    dropout: Dropout, ids: np.ndarray, seed: int, round: int
) -> Participation:
    """Who of a cohort `ids` [K], in any order, stays.

    A function of (seed, round, cohort), whatever its order.
    """
    draws = np.random.default_rng((seed, round, 3)).random((2, len(ids)))
    draws = draws[:, np.argsort(np.argsort(ids))]
    is_present = draws[0] >= dropout.before_training
    return Participation(is_present, is_present & (draws[1] >= dropout.after_training))
