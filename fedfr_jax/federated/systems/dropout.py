"""Dropout: clients that leave a round, before or after training.

A client that leaves before has done nothing. One that leaves after has trained, so its
personal state changes, but its update is lost. Both have received what the server
prepares for the cohort (`Algorithm.prepare`).
"""

from typing import NamedTuple

import numpy as np

from fedfr_jax.ranges import BelowOne
from fedfr_jax.types import Participation


class Dropout(NamedTuple):
    """Probabilities that a client leaves a round, independent for each client."""

    before_training: BelowOne = 0.0  # in [0, 1)
    after_training: BelowOne = 0.0  # in [0, 1), of those that have trained


def drop_clients(
    dropout: Dropout, ids: np.ndarray, seed: int, round: int
) -> Participation:
    """Sample which clients of a cohort `ids` [K], in any order, stay.

    A function of (seed, round, cohort), whatever its order.
    """
    draws = np.random.default_rng((seed, round, 3)).random((2, len(ids)))
    draws = draws[:, np.argsort(np.argsort(ids))]
    is_present = draws[0] >= dropout.before_training
    return Participation(is_present, is_present & (draws[1] >= dropout.after_training))
