"""Client selection by earlier losses and durations: power of choice, Oort.

Power of choice: Cho et al. 2020, arXiv:2010.01243, the variant rpow-d (section 4): of d
candidates, sampled by their numbers of examples, those with the largest losses. A loss
is the mean of the client's last training; clients that have not trained come first.

Oort: Lai et al. 2021, arXiv:2010.06081, algorithm 1. Deviations: a client's statistical
utility is n_i times its mean loss, where the paper has n_i times the root of the mean
square of examples' losses, which clients here do not report; the preferred duration is
a quantile of all clients' and does not move (no pacer); no client is left out for good.
"""

from typing import NamedTuple

import numpy as np

from fedfr_jax.ranges import Count, NonNegative, Share
from fedfr_jax.schema import check_fields

NEVER = -1  # of a client that has not trained


class Known(NamedTuple):
    """Data of the server on N clients before a round."""

    num_examples: np.ndarray  # [N]
    loss: np.ndarray  # [N] mean of the last training, NEVER before it
    last_round: np.ndarray  # [N] of the last training, NEVER before it
    seconds: np.ndarray  # [N] of a round; zeros without profiles


class PowerOfChoice(NamedTuple):
    """Power of choice: the clients with the largest losses among random candidates."""

    num_candidates: Count  # d, at least K; d = K samples by numbers of examples


class Oort(NamedTuple):
    """Oort: useful and fast clients, and some unexplored ones."""

    exploration: Share = 0.9  # share of new clients at the start,
    exploration_decay: Share = 0.98  # times this in every round,
    min_exploration: Share = 0.2  # but no less
    preferred_quantile: Share = 0.5  # of all durations; slower clients lose utility
    straggler_penalty: NonNegative = 2.0  # alpha, the power of that loss
    cutoff: Share = 0.95  # of the utility that just suffices


def check_sampling(sampling, cohort_size: int) -> None:
    """Raise ValueError for a setting out of range, given the clients asked."""
    if sampling is not None:
        check_fields("sampling.", sampling)
    if isinstance(sampling, PowerOfChoice):
        if sampling.num_candidates < cohort_size:
            raise ValueError(
                f"sampling.num_candidates must be at least {cohort_size}, the number "
                f"of clients asked in a round, got {sampling.num_candidates}."
            )


def choose(
    sampling,
    rng: np.random.Generator,
    ids: np.ndarray,
    number: int,
    history: Known | None,
    round: int,
) -> np.ndarray:
    """Choose `number` of the available clients `ids` [n], or all of them, ascending."""
    number = min(number, len(ids))
    if isinstance(sampling, PowerOfChoice):
        chosen = _by_loss(sampling, rng, ids, number, history)
    elif isinstance(sampling, Oort):
        chosen = _by_utility(sampling, rng, ids, number, history, round)
    else:
        chosen = rng.choice(ids, number, replace=False)
    return np.sort(chosen)


def _by_loss(sampling: PowerOfChoice, rng, ids, number, history):
    share = history.num_examples[ids] / history.num_examples[ids].sum()
    count = min(sampling.num_candidates, len(ids))
    candidates = rng.choice(ids, count, replace=False, p=share)  # in random order
    loss = history.loss[candidates]
    loss = np.where(history.last_round[candidates] == NEVER, np.inf, loss)
    return candidates[np.argsort(-loss, kind="stable")[:number]]


def _by_utility(sampling: Oort, rng, ids, number, history, round):
    is_new = history.last_round[ids] == NEVER
    old, new = ids[~is_new], ids[is_new]
    share = sampling.exploration * sampling.exploration_decay**round
    explored = round_up(max(share, sampling.min_exploration) * number)
    explored = min(max(explored, number - len(old)), len(new))
    useful = _exploit(sampling, rng, old, number - explored, history, round)
    speed = 1 / np.maximum(history.seconds[new], 1e-9)
    p = speed / speed.sum() if len(new) else None
    return np.concatenate([useful, rng.choice(new, explored, replace=False, p=p)])


def _exploit(sampling: Oort, rng, ids, number, history, round):
    """Sample `number` of `ids` by utility, among those near the best."""
    if not number:
        return ids[:0]
    utility = utilities(sampling, ids, history, round)
    utility = np.minimum(utility, np.quantile(utility, 0.95))  # no outlier rules
    threshold = np.sort(utility)[-number]
    is_near = utility >= sampling.cutoff * threshold
    weight = np.maximum(utility[is_near], 1e-12)
    return rng.choice(ids[is_near], number, replace=False, p=weight / weight.sum())


def utilities(
    sampling: Oort, ids: np.ndarray, history: Known, round: int
) -> np.ndarray:
    """Oort's utility of clients `ids` [n] that have been trained before."""
    statistical = history.num_examples[ids] * history.loss[ids]
    since = history.last_round[ids] + 1  # rounds count from 1
    statistical = statistical + np.sqrt(0.1 * np.log(round + 1) / since)
    preferred = np.quantile(history.seconds, sampling.preferred_quantile)
    slower = np.maximum(history.seconds[ids], 1e-9) / max(preferred, 1e-9)
    penalty = np.where(slower > 1, slower**-sampling.straggler_penalty, 1.0)
    return statistical * penalty


def round_up(number: float) -> int:
    """Round up to an integer, with tolerance for rounding errors."""
    return int(np.ceil(number - 1e-9))
