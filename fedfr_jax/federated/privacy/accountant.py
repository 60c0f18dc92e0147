"""Privacy accounting of clipped and noised rounds, by dp-accounting.

The unit of privacy is a client with all its examples. With T rounds, N clients, K of
them in a round, and noise of `noise_multiplier` z times the clip norm on their sum:

    poisson  privacy loss distributions of T Poisson-subsampled Gaussians with
             q = K / N (add or remove a client); beyond its capacity a cohort is cut,
             which is accounted for (truncated Poisson, arXiv:2508.15089)
    cyclic   the same of ceil(T / cycle) rounds within groups of N / cycle clients
             (Choquette-Choo et al. 2023, arXiv:2306.08153)
    fixed    Renyi divergences of sampling without replacement (replace a client by
             another, which moves the sum by twice the clip norm)
    shuffle  no amplification: ceil(T / floor(N / K)) Gaussians, as often as a client
             takes part at most

Sampling amplifies privacy only if the cohorts are known to the server alone.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import optimize

from fedfr_jax.federated.privacy.correlated import Strategy
from fedfr_jax.federated.sampling import Sampling, check_sampling
from fedfr_jax.ranges import Count, Positive
from fedfr_jax.schema import checked

GRIDS = (2e-5, 2e-3)  # of privacy losses; a coarser one gives larger epsilons
MIN_NOISE = 0.3  # of loss distributions, which take minutes and gigabytes below it
ORDERS = [*range(2, 65), 96, 128]  # of Renyi divergences
EXACT_ROUNDS, STEP = 16, 1.05  # of `epsilon_bound`


class Mechanism(NamedTuple):
    """Privacy-relevant settings of the rounds, for an accountant."""

    num_clients: int  # N
    cohort_size: int  # K, the mean of a Poisson cohort
    noise_multiplier: float  # z: the noise's standard deviation over the clip norm
    delta: float
    sampling: Sampling = Sampling()
    is_local: bool = False  # each client adds the noise to its own update
    strategy: Strategy | None = None  # of correlated noise; None: independent


class Accountant(NamedTuple):
    """Epsilon after each number of rounds of a run."""

    mechanism: Mechanism
    budget: float  # of epsilon, which no round exceeds
    epsilon: Callable[[int], float]  # after that many rounds, 0 before the first
    # An upper bound within a few percent of epsilon: cheaper for each of many rounds.
    epsilon_bound: Callable[[int], float]

    def rounds_within_budget(self, max_rounds: int) -> int:
        """Number of rounds, at most `max_rounds`, within the privacy budget."""
        if self.mechanism.strategy:
            max_rounds = min(max_rounds, self.mechanism.strategy.rounds)
        if self.budget == math.inf:
            return max_rounds
        low, high = 0, max_rounds + 1  # rounds within the budget, and beyond it
        middle = max_rounds  # all of them, as a rule
        while high - low > 1:
            is_within = self.epsilon(middle) <= self.budget
            low, high = (middle, high) if is_within else (low, middle)
            middle = (low + high) // 2
        return low


@functools.lru_cache(maxsize=32)
def build_accountant(mechanism: Mechanism, budget: float = math.inf) -> Accountant:
    """Build the accountant of a mechanism; cached."""
    check_mechanism(mechanism)
    epsilon_after, epsilons = _epsilon_of(mechanism), {0: 0.0}

    def epsilon(rounds):
        if rounds not in epsilons:
            epsilons[rounds] = float(epsilon_after(rounds))
        return epsilons[rounds]

    def bound(rounds):
        if not _is_slow(mechanism):
            return epsilon(rounds)
        limit = _next_on_grid(rounds)
        epsilon(min((x for x in epsilons if rounds <= x <= limit), default=limit))
        return min(epsilons[x] for x in epsilons if rounds <= x <= limit)

    return Accountant(mechanism, budget, epsilon, bound)


def check_round(accountant: Accountant | None, round: int) -> None:
    """Raise ValueError unless a round, from 0, is within the budget."""
    if accountant is None:
        return
    budget, strategy = accountant.budget, accountant.mechanism.strategy
    if strategy and round >= strategy.rounds:
        raise ValueError(
            f"privacy.noise must be built for all rounds, got noise for "
            f"{strategy.rounds} rounds before round {round + 1}."
        )
    if budget == math.inf or accountant.epsilon_bound(round + 1) <= budget:
        return
    if (spent := accountant.epsilon(round + 1)) > budget:
        raise ValueError(
            f"epsilon must stay within privacy.epsilon={budget:.4g}, but round "
            f"{round + 1} would bring it to {spent:.4g}. Stop here, or add more noise "
            "from the start."
        )


def affordable_rounds(accountant: Accountant | None, num_rounds: int) -> int:
    """Number of the rounds within the privacy budget; prints when they are fewer."""
    if accountant is None:
        return num_rounds
    check_round(accountant, 0)
    allowed = accountant.rounds_within_budget(num_rounds)
    if allowed < num_rounds:
        print(
            f"Only {allowed} of {num_rounds} rounds are trained: round {allowed + 1} "
            f"would spend more than privacy.epsilon = {accountant.budget:.4g}.",
            flush=True,
        )
    return allowed


def check_mechanism(mechanism: Mechanism) -> None:
    """Raise ValueError for a mechanism that `build_accountant` cannot account for."""
    num_clients, delta = mechanism.num_clients, mechanism.delta
    if not 0 < delta <= 1 / num_clients:
        raise ValueError(
            f"privacy.delta must be positive and at most 1 / N = {1 / num_clients:.3g} "
            f"of {num_clients} clients, got {delta}: a mechanism that publishes one "
            "client would pass with a larger one. Take 1 / N^1.1 or less."
        )
    check_sampling(mechanism.sampling, num_clients, mechanism.cohort_size)
    if mechanism.strategy is None:
        return
    name, separation = mechanism.sampling.name, mechanism.strategy.min_separation
    groups = mechanism.sampling.num_groups(num_clients, mechanism.cohort_size)
    if name != "cyclic" or groups < separation:
        raise ValueError(
            f"privacy.noise={mechanism.strategy.name!r} needs sampling 'cyclic' with "
            f"at least {separation} groups, the rounds between a client's "
            f"participations, got {name!r} with {groups}."
        )


def participations(mechanism: Mechanism, rounds: int) -> int:
    """Largest number of rounds in which a client can participate."""
    per_epoch = {
        "shuffle": mechanism.num_clients // mechanism.cohort_size,
        "cyclic": mechanism.sampling.num_groups(
            mechanism.num_clients, mechanism.cohort_size
        ),
    }.get(mechanism.sampling.name, 1)
    return -(-rounds // per_epoch)


@checked
def calibrate_noise(mechanism: Mechanism, *, epsilon: Positive, rounds: Count) -> float:
    """Smallest noise multiplier, to a thousandth, for `rounds` within `epsilon`.

    Args:
      mechanism: its noise multiplier is ignored.
      epsilon: > 0, after the last round.
    """
    check_mechanism(mechanism)

    def excess(noise_multiplier):
        candidate = mechanism._replace(noise_multiplier=noise_multiplier)
        return _epsilon_of(candidate)(rounds) - epsilon

    def quick_excess(noise_multiplier):
        candidate = mechanism._replace(noise_multiplier=noise_multiplier)
        return _renyi_poisson(candidate, is_cut=False)(rounds) - epsilon

    low, high = 1.0, 1.0
    if _is_slow(mechanism):  # the Renyi bound needs up to a third more noise
        high = _smallest_noise(quick_excess, 1.0, 1.0)
        low = high / 1.5
    return _smallest_noise(excess, low, high)


def _smallest_noise(excess: Callable, low: float, high: float) -> float:
    """Find the root of a falling function near [low, high], from above, to 0.001."""
    while excess(high) > 0:
        low, high = high, 1.5 * high
    while excess(low) <= 0:
        low, high = low / 1.5, low
    root = optimize.brentq(excess, low, high, rtol=2e-4)
    while excess(root) > 0:
        root *= 1.0003
    return float(root)


def _is_slow(mechanism: Mechanism) -> bool:
    """Whether a loss distribution must be composed for each number of rounds."""
    is_single = mechanism.is_local or _is_released_once(mechanism.strategy)
    return mechanism.sampling.is_poisson and not is_single and _chance(mechanism) < 1


def _is_released_once(strategy: Strategy | None) -> bool:
    """Whether all rounds are accounted as a single Gaussian."""
    return strategy is not None and not strategy.is_banded


def _epsilon_of(mechanism: Mechanism) -> Callable[[int], float]:
    """Build rounds (at least 1) -> epsilon for a mechanism."""
    if not mechanism.noise_multiplier:
        return lambda rounds: math.inf
    if mechanism.is_local:
        return _replacing(mechanism)  # a single update is not hidden in a sum
    if _is_released_once(mechanism.strategy):
        return _single_release(mechanism)
    if _is_slow(mechanism):
        is_small = mechanism.noise_multiplier < MIN_NOISE
        return (_renyi_poisson if is_small else _poisson)(mechanism)
    if mechanism.sampling.name != "fixed":
        return _repeated(mechanism)
    is_sampled = mechanism.cohort_size < mechanism.num_clients
    return _renyi_fixed(mechanism) if is_sampled else _replacing(mechanism)


def _repeated(mechanism: Mechanism) -> Callable[[int], float]:
    """Epsilon of one Gaussian per participation of a client, without amplification."""

    def epsilon(rounds):
        times = participations(mechanism, rounds)
        return _gaussian(mechanism.noise_multiplier / math.sqrt(times), mechanism.delta)

    return epsilon


def _replacing(mechanism: Mechanism) -> Callable[[int], float]:
    """`_repeated` for replace-one adjacency, which doubles the sensitivity."""
    half = mechanism._replace(noise_multiplier=mechanism.noise_multiplier / 2)
    return _repeated(half)


def _single_release(mechanism: Mechanism) -> Callable[[int], float]:
    """Epsilon of one Gaussian, with the sensitivity of the rounds so far."""
    strategy = mechanism.strategy

    def epsilon(rounds):
        so_far = strategy.sensitivity(rounds) / strategy.sensitivity(strategy.rounds)
        return _gaussian(mechanism.noise_multiplier / so_far, mechanism.delta)

    return epsilon


@functools.lru_cache(maxsize=128)  # the same in all rounds of an epoch
def _gaussian(noise_multiplier: float, delta: float) -> float:
    import dp_accounting  # of the extra [privacy], as all below

    return dp_accounting.get_epsilon_gaussian(noise_multiplier, delta)


def _poisson(mechanism: Mechanism) -> Callable[[int], float]:
    """Epsilon by composing the loss distribution of one round, on an adaptive grid."""
    delta = mechanism.delta
    uncut = _loss_distribution(mechanism, 5e-3, is_cut=False)
    first_epsilon = uncut.get_epsilon_for_delta(delta)  # of one round, for its order
    whole = _loss_distribution(mechanism, float(np.clip(first_epsilon / 150, *GRIDS)))

    def epsilon(rounds):
        composed = whole.self_compose(_compositions(mechanism, rounds))
        return composed.get_epsilon_for_delta(delta)

    return epsilon


def _chance(mechanism: Mechanism) -> float:
    return mechanism.sampling.chance(mechanism.num_clients, mechanism.cohort_size)


def _sizes(mechanism: Mechanism) -> tuple[int, int]:
    """(clients that a round samples from, the most that it takes)."""
    sizes = mechanism.num_clients, mechanism.cohort_size
    sampling = mechanism.sampling
    return sampling.group_size(*sizes), sampling.max_cohort(*sizes)


def _compositions(mechanism: Mechanism, rounds: int) -> int:
    groups = mechanism.sampling.num_groups(mechanism.num_clients, mechanism.cohort_size)
    return -(-rounds // groups)


def _loss_distribution(mechanism: Mechanism, grid: float, is_cut: bool = True):
    """Privacy loss distribution of a subsampled Gaussian, truncated at the capacity."""
    from dp_accounting.pld import privacy_loss_distribution as losses

    size, capacity = _sizes(mechanism)
    noise, chance = mechanism.noise_multiplier, _chance(mechanism)
    if capacity == size or not is_cut:
        return losses.from_gaussian_mechanism(
            noise, sampling_prob=chance, value_discretization_interval=grid
        )
    return losses.from_truncated_subsampled_gaussian_mechanism(
        dataset_size=size,
        sampling_probability=chance,
        truncated_batch_size=capacity,
        noise_multiplier=noise,
        value_discretization_interval=grid,
    )


def _renyi(event, delta: float, **options) -> Callable[[int], float]:
    """Epsilon by Renyi accounting of `event` once per round."""
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(ORDERS, **options).compose(event)

    def epsilon(times):
        return rdp.compute_epsilon(accountant.orders, times * accountant.rdp, delta)[0]

    return epsilon


def _renyi_fixed(mechanism: Mechanism) -> Callable[[int], float]:
    """Renyi epsilon of K of N clients without replacement; replacing one moves 2 C."""
    import dp_accounting

    event = dp_accounting.SampledWithoutReplacementDpEvent(
        mechanism.num_clients,
        mechanism.cohort_size,
        dp_accounting.GaussianDpEvent(mechanism.noise_multiplier / 2),
    )
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    return _renyi(event, mechanism.delta, neighboring_relation=relation)


def _renyi_poisson(
    mechanism: Mechanism, *, is_cut: bool = True
) -> Callable[[int], float]:
    """Fast upper bound of `_poisson`, by Renyi accounting.

    Where a cohort is cut at its capacity, a client takes the place of another, which
    moves the sum by twice the clip norm.
    """
    import dp_accounting

    size, capacity = _sizes(mechanism)
    noise = mechanism.noise_multiplier / (2 if is_cut and capacity < size else 1)
    gaussian = dp_accounting.GaussianDpEvent(noise)
    event = dp_accounting.PoissonSampledDpEvent(_chance(mechanism), gaussian)
    each = _renyi(event, mechanism.delta)
    return lambda rounds: each(_compositions(mechanism, rounds))


def _next_on_grid(rounds: int) -> int:
    """Next number >= `rounds` on a grid that grows by a twentieth."""
    number = EXACT_ROUNDS
    while number < rounds:
        number = math.ceil(number * STEP)
    return max(number, rounds) if rounds > EXACT_ROUNDS else rounds
