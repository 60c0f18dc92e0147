"""Client sampling in O(K) time and memory.

    shuffle  K of N, each client at most once in an epoch of floor(N / K) rounds
    fixed    K of N, independently in every round
    poisson  each client independently with probability K / N: a cohort of K on average
    cyclic   groups of N / `cycle` clients in turn, each client of the round's group
             with probability K `cycle` / N, so that a client's rounds are at least
             `cycle` rounds apart

A cohort is a function of (seed, round): keyed permutations of the population, and for
Poisson cohorts a binomial number of how many of its first clients take part.
"""

from typing import Literal, NamedTuple

import numpy as np

from fedfr_jax.data.permutation import permute_on_host
from fedfr_jax.parts import section
from fedfr_jax.ranges import Whole
from fedfr_jax.schema import check_fields
from fedfr_jax.types import Algorithm

MARGIN = 6.0  # standard deviations of a Poisson cohort above its mean


@section
class Sampling(NamedTuple):
    """How a round's clients are sampled."""

    name: Literal["shuffle", "fixed", "poisson", "cyclic"] = "shuffle"
    capacity: Whole = 0  # of a Poisson cohort; clients beyond are left out; 0: auto
    cycle: Whole = 0  # groups of `cyclic`; 0: as many as cohorts fit the population

    @property
    def is_poisson(self) -> bool:
        """Whether cohorts have a random size."""
        return self.name in ("poisson", "cyclic")

    def num_groups(self, population: int, cohort: int) -> int:
        """Number of groups of clients that take turns, 1 if there are none."""
        if self.name != "cyclic":
            return 1
        return self.cycle or population // cohort

    def group_size(self, population: int, cohort: int) -> int:
        """Number of clients from which a round samples."""
        return population // self.num_groups(population, cohort)

    def chance(self, population: int, cohort: int) -> float:
        """Probability that a client of the round's group participates."""
        return cohort / self.group_size(population, cohort)

    def max_cohort(self, population: int, cohort: int) -> int:
        """Largest number of clients in a round: K, or a Poisson cohort's capacity."""
        if not self.is_poisson:
            return cohort
        size = self.group_size(population, cohort)
        share = cohort / size
        spread = MARGIN * np.sqrt(cohort * (1 - share))
        return min(self.capacity or int(np.ceil(cohort + spread)), size)


def check_sampling(sampling: Sampling, population: int, cohort: int) -> None:
    """Check that such cohorts can be sampled."""
    check_fields("sampling.", sampling)
    if cohort > population:
        raise ValueError(
            f"cohort_size must be at most {population}, the number of clients, got "
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
) -> tuple[np.ndarray, np.ndarray | None]:
    """Sample a round's clients, padded to a constant number.

    Args:
      cohort: K, or the mean of a Poisson cohort.

    Returns:
      ids [K'] int64, ascending, each once, and whether they were drawn, [K'] bool; None
      where all were. K' is `max_cohort`.
    """
    if sampling.name == "shuffle":
        return sample_cohort(seed, round, population, cohort), None
    size = sampling.group_size(population, cohort)
    places = np.arange(sampling.max_cohort(population, cohort))
    ids = permute_on_host(_key(seed, round, 41), places, size)
    if sampling.name == "fixed":
        return np.sort(ids), None
    groups = sampling.num_groups(population, cohort)
    if groups > 1:  # the groups are the same in all rounds
        ids = ids + (round % groups) * size
        ids = permute_on_host(_key(seed, 0, 42), ids, population)
    number = np.random.default_rng((seed, round, 43)).binomial(size, cohort / size)
    order = np.argsort(ids)
    return ids[order], (places < number)[order]


def sample_cohort(seed: int, round: int, population: int, cohort: int) -> np.ndarray:
    """Sample a round's cohort: ids ascending, [K] int64, in O(K) time and memory.

    A client is sampled at most once in an epoch of floor(N / K) rounds; each epoch has
    its own permutation, a function of (seed, epoch).
    """
    if cohort == population:
        return np.arange(population)
    epoch, turn = divmod(round, population // cohort)
    key = np.random.SeedSequence((seed, epoch)).generate_state(1)[0]
    index = turn * cohort + np.arange(cohort)
    return np.sort(permute_on_host(int(key), index, population))


def random_client(ids: np.ndarray, seed: int, round: int) -> int:
    """Choose a random client of a cohort `ids` [K]; independent of their order.

    A function of (seed, round, cohort), each client as likely as the others; -1 of an
    empty one.
    """
    if not len(ids):
        return -1
    draw = np.random.default_rng((seed, round, 2)).integers(len(ids))
    return int(np.sort(ids)[draw])


def _key(*entropy: int) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def check_built_for(algorithm: Algorithm, num_clients: int) -> None:
    """Raise ValueError if an algorithm was given another number of clients."""
    for name, number in algorithm.built_for:
        if number != num_clients:
            raise ValueError(
                f"num_clients of {name} must be {num_clients}, the number of the "
                f"data's clients, got {number}."
            )
