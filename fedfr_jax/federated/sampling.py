"""Sampling of clients: who may train in a round, in O(K) time and memory.

    shuffle  K of N, nobody twice within an epoch of floor(N / K) rounds
    fixed    K of N, drawn anew in every round
    poisson  every client on its own with chance K / N: a cohort of K on average
    cyclic   groups of N / `cycle` clients in turn, every client of the round's group
             with chance K `cycle` / N, so that nobody trains again before `cycle`
             rounds have passed

A cohort is a function of (seed, round): keyed permutations of the population, and for
Poisson cohorts a binomial number of how many of its first clients take part.
"""

from typing import NamedTuple

import numpy as np

from fedfr_jax.data.permutation import permute_on_host
from fedfr_jax.schema import check_choice

SAMPLINGS = ("shuffle", "fixed", "poisson", "cyclic")
MARGIN = 6.0  # standard deviations of a Poisson cohort above its mean


class Sampling(NamedTuple):
    """How a round's clients are drawn."""

    name: str = "shuffle"
    capacity: int = (
        0  # of a Poisson cohort: who is drawn beyond it is left out; 0: auto
    )
    cycle: int = 0  # groups of `cyclic`; 0: as many as cohorts fit the population

    def num_groups(self, population: int, cohort: int) -> int:
        """Groups of clients that take turns, 1 where there are none."""
        if self.name != "cyclic":
            return 1
        return self.cycle or population // cohort

    def group_size(self, population: int, cohort: int) -> int:
        """Clients of which a round draws; `cyclic` leaves a remainder of N out."""
        return population // self.num_groups(population, cohort)

    def chance(self, population: int, cohort: int) -> float:
        """With which a client of the round's group takes part."""
        return cohort / self.group_size(population, cohort)

    def max_cohort(self, population: int, cohort: int) -> int:
        """The most clients of a round: K, or the capacity of a Poisson cohort."""
        if self.name not in ("poisson", "cyclic"):
            return cohort
        size = self.group_size(population, cohort)
        share = cohort / size
        spread = MARGIN * np.sqrt(cohort * (1 - share))
        return min(self.capacity or int(np.ceil(cohort + spread)), size)


def check_sampling(sampling: Sampling, population: int, cohort: int) -> None:
    """Check that such cohorts can be drawn.

    Raises:
      ValueError: for an unknown name, a cohort that is empty or larger than the
        population or its groups, or a capacity below the cohort.
    """
    check_choice("sampling", sampling.name, SAMPLINGS)
    if not 0 < cohort <= population:
        raise ValueError(
            f"cohort_size must lie in [1, {population}], the number of clients, got "
            f"{cohort}."
        )
    groups = sampling.num_groups(population, cohort)
    if cohort * groups > population:
        raise ValueError(
            f"sampling.cycle must be at most {population // cohort}, so that each of "
            f"its groups has a cohort of {cohort}, got {groups}."
        )
    if 0 < sampling.capacity < cohort:
        raise ValueError(
            f"sampling.capacity must be at least the cohort_size of {cohort}, got "
            f"{sampling.capacity}. A capacity well above it costs no privacy."
        )


def sample_clients(
    sampling: Sampling, seed: int, round: int, population: int, cohort: int
) -> np.ndarray:
    """Ids of a round's clients, ascending, [K'] int64; K' = K but for Poisson cohorts.

    Args:
      cohort: K, or the mean of K'.
    """
    draw = {
        "shuffle": _shuffled,
        "fixed": _fixed,
        "poisson": _poisson,
        "cyclic": _poisson,
    }[sampling.name]
    return np.sort(draw(sampling, seed, round, population, cohort))


def _shuffled(sampling, seed, round, population, cohort):
    """A keyed permutation per epoch, cut into cohorts."""
    del sampling
    if cohort == population:
        return np.arange(population)
    epoch, turn = divmod(round, population // cohort)
    index = turn * cohort + np.arange(cohort)
    return permute_on_host(_key(seed, epoch), index, population)


def _fixed(sampling, seed, round, population, cohort):
    """The first K of a permutation of the round's own."""
    del sampling
    return permute_on_host(_key(seed, round, 3), np.arange(cohort), population)


def _poisson(sampling, seed, round, population, cohort):
    """A binomial number of the round's group, in an order of the round's own."""
    size = sampling.group_size(population, cohort)
    groups = sampling.num_groups(population, cohort)
    rng = np.random.default_rng((seed, round, 4))
    number = rng.binomial(size, cohort / size)
    number = min(number, sampling.max_cohort(population, cohort))
    place = permute_on_host(_key(seed, round, 3), np.arange(number), size)
    if groups == 1:
        return place
    # Who is in which group stays for the whole run.
    place = place + (round % groups) * size
    return permute_on_host(_key(seed, 0, 5), place, population)


def _key(*words: int) -> int:
    return int(np.random.SeedSequence(words).generate_state(1)[0])
