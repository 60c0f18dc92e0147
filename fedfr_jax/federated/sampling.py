"""Who trains in a round: a keyed permutation of the population, cut into cohorts."""

import numpy as np

from fedfr_jax.permutation import permute_host


def sample(seed: int, round: int, population: int, cohort: int) -> np.ndarray:
    """Ids of a round's cohort, ascending, [K] int64, in O(K) time and memory.

    Within an epoch of floor(N / K) rounds nobody is drawn twice; each epoch has its
    own permutation, a function of (seed, epoch).

    Raises:
      ValueError: when the cohort is empty or larger than the population.
    """
    if not 0 < cohort <= population:
        raise ValueError(
            f"cohort_size must lie in [1, {population}], the number of clients, got "
            f"{cohort}."
        )
    if cohort == population:
        return np.arange(population)
    epoch, turn = divmod(round, population // cohort)
    key = np.random.SeedSequence((seed, epoch)).generate_state(1)[0]
    index = turn * cohort + np.arange(cohort)
    return np.sort(permute_host(int(key), index, population))


def first_of(ids: np.ndarray, seed: int, round: int) -> int:
    """The client of a cohort `ids` [K], in any order, that comes first by chance.

    A function of (seed, round, cohort), each client as likely as the others.
    """
    draw = np.random.default_rng((seed, round, 2)).integers(len(ids))
    return int(np.sort(ids)[draw])
