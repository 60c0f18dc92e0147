"""Privacy accounting of clipped and noised rounds, by dp-accounting.

The unit of privacy is a client with all its examples. With T rounds, N clients, K of
them in a round, and noise of `noise_multiplier` z times the clip norm on their sum:

    poisson  privacy loss distributions of T Poisson-subsampled Gaussians with
             q = K / N (add or remove a client); beyond its capacity a cohort is cut,
             which is accounted for (truncated Poisson, arXiv:2508.15089)
    cyclic   the same of ceil(T / cycle) rounds within groups of N / cycle clients
             (Choquette-Choo et al. 2023, arXiv:2306.08153)
    fixed    privacy loss distributions of T samples without replacement (replace a
             client by another, which moves the sum by twice the clip norm)
    shuffle  no amplification: ceil(T / floor(N / K)) Gaussians, as often as a client
             takes part at most

Skellam noise of whole numbers has Renyi divergences, without amplification.

Sampling amplifies privacy only if the cohorts are known to the server alone. Rounds of
other noise, such as those before a run was made longer, are composed with them: loss
distributions convolved, Gaussians' 1 / z^2 added, Renyi divergences added.
"""

import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from fedfr_jax.federated.privacy.correlated import Strategy
from fedfr_jax.federated.privacy.ledger import (
    Ledger,
    Mechanism,
    align,
    extend,
    noise_multipliers,
    num_rounds,
)
from fedfr_jax.federated.privacy.skellam import skellam_divergences
from fedfr_jax.federated.sampling import check_sampling
from fedfr_jax.ranges import MAX, Count, Positive
from fedfr_jax.schema import checked

GRIDS = (2e-5, 2e-3)  # of privacy losses; a coarser one gives larger epsilons
MIN_NOISE = 0.3  # of loss distributions, which take minutes and gigabytes below it
ORDERS = [*range(2, 65), 96, 128]  # of Renyi divergences
EXACT_ROUNDS, STEP = 16, 1.05  # of `epsilon_bound`
Times = tuple[tuple[float, int], ...]  # ((noise multiplier, rounds that have it), ...)


class Accountant(NamedTuple):
    """Epsilon after each number of rounds of a run."""

    mechanism: Mechanism  # of the rounds to come
    budget: float = math.inf  # of epsilon, which no round exceeds
    past: Ledger = ()  # of rounds that were done before this run was built
    end: int = MAX  # rounds from this one on send nothing, see `ended`

    def epsilon(self, rounds: int) -> float:
        """Epsilon after that many rounds, 0 before the first."""
        after, known = _epsilons(self.mechanism, self.past)
        rounds = min(rounds, self.end)
        if rounds not in known:
            known[rounds] = float(after(rounds))
        return known[rounds]

    def epsilon_bound(self, rounds: int) -> float:
        """Bound within a few percent of epsilon: cheaper for each of many rounds."""
        rounds = limit = min(rounds, self.end)
        if _is_slow(self.mechanism):
            # The past is not changed by rounds of other noise that came after.
            ends = itertools.accumulate(entry.rounds for entry in self.past)
            limit = min([_next_on_grid(rounds), *(x for x in ends if rounds <= x)])
        _, known = _epsilons(self.mechanism, self.past)
        return self.epsilon(
            min((x for x in known if rounds <= x <= limit), default=limit)
        )

    def ledger(self, rounds: int) -> Ledger:
        """What has been done after that many rounds."""
        return extend(self.past, self.mechanism, min(rounds, self.end))

    def rounds_within_budget(self, max_rounds: int) -> int:
        """Number of rounds, at most `max_rounds`, within the privacy budget."""
        if self.mechanism.strategy:
            max_rounds = min(max_rounds, self.mechanism.strategy.rounds)
        if self.budget == math.inf or self.epsilon(max_rounds) <= self.budget:
            return max_rounds
        first = min(num_rounds(self.past), max_rounds) + 1  # what is done is done
        rounds = range(max_rounds)
        return bisect_right(rounds, self.budget, first, key=self.epsilon) - 1


@functools.lru_cache(maxsize=32)
def _epsilons(mechanism: Mechanism, past: Ledger) -> tuple[Callable, dict]:
    """(rounds -> epsilon, {rounds: epsilon} of those that are known)."""
    return _epsilon_of(mechanism, past), {0: 0.0}


def build_accountant(
    mechanism: Mechanism, budget: float = math.inf, past: Ledger = ()
) -> Accountant:
    """Build the accountant of a mechanism after the rounds of a ledger.

    Raises:
      ValueError: for a mechanism that cannot be accounted for, or not composed with
        the past.
    """
    check_mechanism(mechanism)
    return Accountant(mechanism, budget, align(past, mechanism))


def continued(accountant: Accountant | None, past: Ledger) -> Accountant | None:
    """An accountant of the same rounds to come, after those of a ledger."""
    if accountant is None:
        return None
    return build_accountant(accountant.mechanism, accountant.budget, past)


def ended(accountant: Accountant | None, rounds: int) -> Accountant | None:
    """An accountant of the same run whose rounds from `rounds` on send nothing."""
    return accountant and accountant._replace(end=rounds)


def check_round(accountant: Accountant | None, round: int) -> None:
    """Raise ValueError unless a round, from 0, is within the budget."""
    if accountant is None or round >= accountant.end:
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
    if mechanism.clip_levels and mechanism.sampling.is_poisson:
        raise ValueError(
            "privacy.noise='skellam' needs sampling 'shuffle' or 'fixed', as each "
            "client of a cohort of a fixed size adds its share of the noise, got "
            f"{mechanism.sampling.name!r}."
        )
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


def participations(ledger: Ledger) -> set[Times]:
    """How often a client can meet each noise in a ledger, for each kind of client.

    A round counts where sampling amplifies it, whoever is drawn. Of an epoch's noises a
    shuffled client meets the least, at worst; those of a cyclic group their turns'.
    """
    mechanism, noises = ledger[-1].mechanism, noise_multipliers(ledger)
    sampling, num_clients = mechanism.sampling, mechanism.num_clients
    met = [noises]
    if sampling.name == "shuffle":
        epoch = num_clients // (mechanism.num_sampled or mechanism.cohort_size)
        met = [np.minimum.reduceat(noises, np.arange(0, len(noises), epoch))]
    elif sampling.name == "cyclic":
        groups = sampling.num_groups(num_clients, mechanism.cohort_size)
        met = [noises[i::groups] for i in range(min(groups, len(noises)))]
    kinds = {_times(x) for x in met}
    return {x for x in kinds if not any(x != y and _is_within(x, y) for y in kinds)}


def _times(noises: np.ndarray) -> Times:
    values, counts = np.unique(noises, return_counts=True)
    return tuple(zip(values.tolist(), counts.tolist(), strict=True))


def _is_within(times: Times, others: Times) -> bool:
    """Whether each noise is met at least as often in `others`."""
    return all(count <= dict(others).get(noise, 0) for noise, count in times)


@checked
def calibrate_noise(mechanism: Mechanism, *, epsilon: Positive, rounds: Count) -> float:
    """Smallest noise multiplier, to a thousandth, for `rounds` within `epsilon`.

    Args:
      mechanism: its noise multiplier is ignored.
      epsilon: after the last round.
    """
    from scipy import optimize  # slow to import

    check_mechanism(mechanism)

    def excess(noise_multiplier):
        candidate = mechanism._replace(noise_multiplier=noise_multiplier)
        return _epsilon_of(candidate)(rounds) - epsilon

    low = high = 1.0
    while excess(high) > 0:
        low, high = high, 1.5 * high
    while excess(low) <= 0:
        low, high = low / 1.5, low
    noise = float(optimize.root_scalar(excess, bracket=(low, high), rtol=2e-4).root)
    while excess(noise) > 0:
        noise *= 1.0003
    return noise


def _is_slow(mechanism: Mechanism) -> bool:
    """Whether a loss distribution must be composed for each number of rounds."""
    is_sampled = mechanism.sampling.name != "shuffle" and _chance(mechanism) < 1
    is_single = mechanism.is_local or _single_release(mechanism) is not None
    return is_sampled and not is_single and not mechanism.clip_levels


def _single_release(mechanism: Mechanism) -> Strategy | None:
    """The strategy by which all rounds are accounted as a single Gaussian, if any."""
    strategy = mechanism.strategy
    return None if strategy is None or strategy.is_banded else strategy


def _epsilon_of(mechanism: Mechanism, past: Ledger = ()) -> Callable[[int], float]:
    """Build rounds (at least 1) -> epsilon of the past, then of the mechanism too."""
    if past and past[-1].mechanism == mechanism:
        past = past[:-1]
    noise, num_past = mechanism.noise_multiplier, num_rounds(past)
    if (strategy := _single_release(mechanism)) and noise:
        at_end = strategy.sensitivity(strategy.rounds)
        so_far = lambda rounds: strategy.sensitivity(rounds) / at_end
        return lambda rounds: _gaussian(noise / so_far(rounds), mechanism.delta)
    before, composed = lambda rounds: 0.0, lambda times: math.inf
    if past:
        before = _epsilon_of(past[-1].mechanism, past[:-1])
    if noise:
        composed = _composed(mechanism, {noise, *noise_multipliers(past)} - {0.0})

    def epsilon(rounds):
        spent = before(min(rounds, num_past))
        if rounds <= num_past or spent == math.inf:
            return spent
        kinds = participations(extend(past, mechanism, rounds))
        # Not below what was spent, from which another grid of losses may differ.
        return max(spent, *map(composed, kinds))

    return epsilon


def _composed(mechanism: Mechanism, noises: set[float]) -> Callable[[Times], float]:
    """Build rounds of each of the noises -> epsilon."""
    if mechanism.clip_levels:
        return _by_divergences(mechanism, _skellam_curve)
    if not _is_slow(mechanism):
        return functools.partial(_gaussians, mechanism)
    if any(_noise_over_move(mechanism, x) < MIN_NOISE for x in noises):
        return _by_divergences(mechanism, _sampled_curve)
    return _by_losses(mechanism, noises)


def _noise_over_move(mechanism: Mechanism, noise: float) -> float:
    """Noise over how far a neighbor moves the sum: replacing a client moves it 2 C."""
    return noise / 2 if mechanism.neighbors == "replace-one" else noise


def _gaussians(mechanism: Mechanism, times: Times) -> float:
    """Epsilon of one Gaussian per participation of a client, without amplification."""
    inverse = sum(n * _noise_over_move(mechanism, x) ** -2 for x, n in times)
    return _gaussian(1 / math.sqrt(inverse), mechanism.delta)


@functools.lru_cache(maxsize=128)  # the same in all rounds of an epoch
def _gaussian(noise_multiplier: float, delta: float) -> float:
    import dp_accounting  # of the extra [privacy], as all below

    return dp_accounting.get_epsilon_gaussian(noise_multiplier, delta)


def _by_divergences(mechanism: Mechanism, curve: Callable) -> Callable[[Times], float]:
    """Epsilon by Renyi accounting: fast, a third above that of loss distributions.

    Args:
      curve: (mechanism, noise) -> Renyi divergences of a round, [ORDERS].
    """
    from dp_accounting import rdp

    of_round = functools.cache(functools.partial(curve, mechanism))

    def epsilon(times):
        total = np.sum([n * of_round(x) for x, n in times], axis=0)
        return rdp.compute_epsilon(ORDERS, total.tolist(), mechanism.delta)[0]

    return epsilon


def _skellam_curve(mechanism: Mechanism, noise: float) -> np.ndarray:
    """Divergences of Skellam noise, once per participation of a client."""
    levels, over_move = mechanism.clip_levels, _noise_over_move(mechanism, noise)
    sensitivity = levels * noise / over_move
    return skellam_divergences(np.asarray(ORDERS), noise * levels, sensitivity)


def _sampled_curve(mechanism: Mechanism, noise: float) -> np.ndarray:
    """Divergences of a sampled Gaussian.

    Where a cohort is cut at its capacity, a client takes the place of another, which
    moves the sum by twice the clip norm.
    """
    import dp_accounting
    from dp_accounting import rdp

    size, capacity = _sizes(mechanism)
    gaussian = dp_accounting.GaussianDpEvent(noise / 2 if capacity < size else noise)
    event = dp_accounting.PoissonSampledDpEvent(_chance(mechanism), gaussian)
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    if mechanism.sampling.name == "fixed":
        event = dp_accounting.SampledWithoutReplacementDpEvent(size, capacity, gaussian)
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    return np.asarray(rdp.RdpAccountant(ORDERS, relation).compose(event).rdp)


def _by_losses(mechanism: Mechanism, noises: Iterable[float]):
    """Epsilon by composing loss distributions of single rounds, on an adaptive grid."""
    delta = mechanism.delta
    rough = [_loss_distribution(mechanism, x, 5e-3, is_cut=False) for x in noises]
    orders = [x.get_epsilon_for_delta(delta) for x in rough]
    # Of both, as what the loudest round has on the grid of the quietest takes minutes.
    grid = float(np.clip(max(min(orders) / 150, max(orders) / 5000), *GRIDS))
    of_round = functools.cache(lambda x: _loss_distribution(mechanism, x, grid))

    def epsilon(times):
        parts = [of_round(x).self_compose(n) for x, n in times]
        whole = functools.reduce(lambda a, b: a.compose(b), parts)
        return whole.get_epsilon_for_delta(delta)

    return epsilon


def _chance(mechanism: Mechanism) -> float:
    return mechanism.sampling.chance(mechanism.num_clients, mechanism.cohort_size)


def _sizes(mechanism: Mechanism) -> tuple[int, int]:
    """(clients that a round samples from, the most that it takes)."""
    sizes = mechanism.num_clients, mechanism.cohort_size
    sampling = mechanism.sampling
    return sampling.group_size(*sizes), sampling.max_cohort(*sizes)


def _loss_distribution(
    mechanism: Mechanism, noise: float, grid: float, is_cut: bool = True
):
    """Privacy loss distribution of a subsampled Gaussian, truncated at the capacity."""
    from dp_accounting.pld import privacy_loss_distribution as losses

    (size, capacity), chance = _sizes(mechanism), _chance(mechanism)
    if mechanism.sampling.name == "fixed":
        return _replacing_distribution(_noise_over_move(mechanism, noise), chance, grid)
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


def _replacing_distribution(noise: float, chance: float, grid: float):
    """Privacy loss distribution of a Gaussian on a sample without replacement.

    Zhu et al. 2022, arXiv:2106.08567, theorem 11: replacing a client has at most the
    delta(epsilon) of removing one from a Poisson sample, for epsilon >= 0; by symmetry
    it has 1 - e^epsilon + e^epsilon delta(-epsilon) below. That is a distribution of
    its own, and may be composed. Composing those of adding and of removing apart, as
    jax-privacy does, is a few percent less: unproven, as a client's replacement may
    add in one round and remove in another (Lebeda et al. 2024, arXiv:2405.20769).
    """
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld import privacy_loss_distribution as losses
    from dp_accounting.pld import privacy_loss_mechanism as mechanisms

    removing: Any = mechanisms.GaussianPrivacyLoss(
        noise,
        sampling_prob=chance,
        log_mass_truncation_bound=-50,
        adjacency_type=mechanisms.AdjacencyType.REMOVE,
    )
    most = math.ceil(removing.connect_dots_bounds().epsilon_upper / grid)
    above = removing.get_delta_for_epsilon(grid * np.arange(most + 1))
    factor = np.exp(-grid * np.arange(most, 0, -1))
    below = 1 - factor + factor * above[:0:-1]
    deltas = np.concatenate([below, above])
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        grid, -most, most, deltas
    )
    return losses.PrivacyLossDistribution(pmf)


def _next_on_grid(rounds: int) -> int:
    """Next number >= `rounds` on a grid that grows by a twentieth."""
    number = EXACT_ROUNDS
    while number < rounds:
        number = math.ceil(number * STEP)
    return max(number, rounds) if rounds > EXACT_ROUNDS else rounds
