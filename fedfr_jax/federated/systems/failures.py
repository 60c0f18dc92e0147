"""Failures: clients that leave a round, and stragglers that train for fewer epochs.

Dropout: a client that leaves before training has done nothing. One that leaves after
has trained, so its personal state changes, but its update is lost. Both have received
what the server prepares for the cohort (`Algorithm.prepare`).

Stragglers: the protocol of Li et al. 2020 (FedProx, arXiv:1812.06127, section 5.2): of
K clients, round((1 - ratio) K) train all E epochs, each other one a number of epochs
drawn from 1 to E - 1. Whoever has trained is averaged, or stragglers are dropped, as
original FedAvg does.
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


class Stragglers(NamedTuple):
    """Share of stragglers, and whether they are dropped."""

    ratio: BelowOne = 0.0  # of a round's cohort, in [0, 1)
    are_dropped: bool = False


def check_stragglers(
    stragglers: Stragglers, least_epochs: int, cohort_size: int
) -> None:
    """Check that a round with such a cohort is possible.

    Args:
      least_epochs: E of the round that has the fewest.
    """
    ratio = stragglers.ratio
    if ratio and least_epochs < 2 and not stragglers.are_dropped:
        raise ValueError(
            f"local_epochs must be at least 2 with stragglers, got {least_epochs}."
        )
    if stragglers.are_dropped and not num_active(ratio, cohort_size):
        raise ValueError(
            f"straggler_fraction must leave at least one of {cohort_size} clients if "
            f"stragglers are dropped, got {ratio}."
        )


def num_active(ratio: float, cohort_size: int) -> int:
    """Number of clients in a cohort that are not stragglers."""
    return round(cohort_size * (1 - ratio))


def num_trained(stragglers: Stragglers, cohort_size: int) -> int:
    """Number of clients in a cohort that train at all."""
    dropped = stragglers.are_dropped
    return num_active(stragglers.ratio, cohort_size) if dropped else cohort_size


def active_clients(stragglers: Stragglers, ids: np.ndarray, seed: int, round: int):
    """Mask [K] of the clients of a cohort `ids` [K] that train all epochs."""
    count, is_active = len(ids), np.zeros(len(ids), bool)
    chosen = _random(seed, round, 0).permutation(count)
    is_active[chosen[: num_active(stragglers.ratio, count)]] = True
    return _straggler_mask(ids, is_active)


def client_epochs(
    stragglers: Stragglers, epochs: np.ndarray, ids: np.ndarray, seed: int, round: int
) -> np.ndarray:
    """Epochs [K] of the clients of a cohort `ids` [K], out of `epochs` [] or [K].

    A function of (seed, round, cohort), whatever its order.
    """
    epochs = np.broadcast_to(epochs, ids.shape)
    if not stragglers.ratio or stragglers.are_dropped:
        return epochs
    share = _straggler_mask(ids, _random(seed, round, 1).random(len(ids)))
    fewer = 1 + (share * (epochs - 1)).astype(epochs.dtype)
    return np.where(active_clients(stragglers, ids, seed, round), epochs, fewer)


def _straggler_mask(ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Reorder `values` [K], given for ascending ids, to the order of `ids`."""
    return values[np.argsort(np.argsort(ids))]


def _random(seed: int, round: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng((seed, round, purpose))
