"""Confidence intervals of scaling laws, and hold-out of the largest run.

The law that predicts the largest runs is chosen without them, too.

A replicate samples the variance of the log errors, RSS over a chi-squared number with
n - k degrees of freedom, then normal log errors around the fitted law, and fits the law
to them. Resampling the few runs of a scaling study would give intervals that are far
too narrow.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax.scaling.laws import (
    Coefficients,
    Fit,
    Law,
    best_fit,
    fit,
    fit_laws,
    get_coefficients,
    one_thread,
    predict,
)

LEVEL = 0.9  # of an interval: share of replicates inside
NUM_RESAMPLES = 200


class Replicates(NamedTuple):
    """R laws fitted to simulated errors (parametric bootstrap)."""

    coefficients: Coefficients  # [R, ...]
    sigmas: np.ndarray  # [R] standard deviation of the log errors


class HoldOut(NamedTuple):
    """Measured error of the largest runs, and its prediction from the others."""

    is_held_out: np.ndarray  # [n] bool
    fit: Fit  # to the other runs, of the law that they choose
    predicted: float  # error of the largest size
    low: float  # ends of the interval of the mean error of as many runs there
    high: float
    measured: float  # geometric mean of the runs' errors

    @property
    def is_inside(self) -> bool:
        """Whether the measured error lies in the interval."""
        return self.low <= self.measured <= self.high


def replicates(
    fitted: Fit, inputs: np.ndarray, *, seed: int = 0, draws: int = NUM_RESAMPLES
) -> Replicates:
    """Refit the law to `draws` simulated sets of runs.

    Args:
      inputs: [n, d] of the runs to which the law is fitted.
      seed: replicate i depends on (seed, i) alone.
      draws: at least 1.
    """
    free = len(inputs) - fitted.law.num_coefficients  # at least 1, see `check_sizes`
    expected = np.log(predict(fitted.coefficients, inputs))
    squares = max(np.sum(fitted.residuals**2), 1e-18)
    refits, sigmas = [], []
    with one_thread():
        for i in range(draws):
            rng = np.random.default_rng((seed, i))
            sigma = np.sqrt(squares / rng.chisquare(free))
            errors = np.exp(expected + sigma * rng.standard_normal(len(inputs)))
            refit = get_coefficients(fitted.law, inputs, errors, num_starts=1)
            refits.append(refit)
            sigmas.append(sigma)
    stacked = Coefficients(*map(np.stack, zip(*refits, strict=True)))
    return Replicates(stacked, np.array(sigmas))


def interval(values: np.ndarray, level: float = LEVEL) -> tuple[np.ndarray, np.ndarray]:
    """Central interval of values [R, ...] with probability `level`: two [...]."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def band(refits: Replicates, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Confidence band of the law's error at inputs [m, d]: (low [m], high [m])."""
    return interval(predict(refits.coefficients, inputs))


def hold_out(
    laws: Sequence[Law],
    inputs: np.ndarray,
    errors: np.ndarray,
    *,
    seed: int = 0,
    draws=NUM_RESAMPLES,
) -> HoldOut:
    """Choose and fit a law without the largest runs, and predict them.

    Raises:
      ValueError: when none of `laws` can be fitted without them.
    """
    inputs, errors = np.asarray(inputs, float), np.asarray(errors, float)
    size = inputs.prod(1)
    is_held = size == size.max()
    others = inputs[~is_held], errors[~is_held]
    fits, _ = fit_laws(laws, *others)
    smaller = best_fit(fits or [fit(laws[0], *others)])  # which says why there is none
    refits = replicates(smaller, inputs[~is_held], seed=seed, draws=draws)
    largest = inputs[is_held][:1]
    rng = np.random.default_rng((seed, draws))
    sigmas = refits.sigmas / np.sqrt(is_held.sum())  # of the mean of those runs
    noise = np.exp(sigmas * rng.standard_normal(draws))
    low, high = interval(predict(refits.coefficients, largest)[:, 0] * noise)
    return HoldOut(
        is_held_out=is_held,
        fit=smaller,
        predicted=float(predict(smaller.coefficients, largest)[0]),
        low=float(low),
        high=float(high),
        measured=float(np.exp(np.log(errors[is_held]).mean())),
    )
