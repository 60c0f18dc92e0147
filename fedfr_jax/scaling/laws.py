"""Scaling laws of an error in model and data size, and their fit.

Each law is L = E + sum over j of A_j x_j^-alpha_j, where x is the number of parameters
N, perhaps with the number of images D (Hoffmann et al., Training Compute-Optimal Large
Language Models, 2022, equation 2). A pure power law has one term and no offset E
(Kaplan et al., Scaling Laws for Neural Language Models, 2020, equation 1.1).

For given exponents a law is linear in its other coefficients, so that a grid over the
exponents, with a non-negative least-squares solve at each, finds initial coefficients
(variable projection; Czech et al., Problems with Chinchilla Approach 2, arXiv
2603.22339). L-BFGS then minimizes sum Huber(log predicted - log measured) over all
coefficients (Hoffmann et al., 2022, approach 3). The sum is in units of delta squared:
unscaled it is so small that L-BFGS stops early (Besiroglu et al., Chinchilla Scaling: A
Replication Attempt, arXiv 2404.10102).
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize, nnls
from threadpoolctl import threadpool_limits


class Law(NamedTuple):
    """Terms of a scaling law."""

    name: str
    num_inputs: int  # 1: of N; 2: of N and D
    has_offset: bool

    @property
    def num_coefficients(self) -> int:
        """Number of coefficients: exponents, factors and offset."""
        return 2 * self.num_inputs + self.has_offset

    @property
    def num_points(self) -> int:
        """Number of different inputs needed for a fit with one degree of freedom."""
        return self.num_coefficients + 1 + self.has_offset


POWER = Law("power", 1, False)
SATURATING = Law("saturating", 1, True)
JOINT = Law("joint", 2, True)
MIN_SIZES = 3  # different values of each input
MIN_FACTOR = 1e-300  # of a vanishing term, whose logarithm must exist


class Coefficients(NamedTuple):
    """Coefficients of a law with d inputs; may have leading axes, as for replicates."""

    exponents: np.ndarray  # [..., d] alpha
    factors: np.ndarray  # [..., d] A, positive
    offset: np.ndarray  # [...] E, 0 without one


def predict(coefficients: Coefficients, inputs: np.ndarray) -> np.ndarray:
    """Predict the error [..., n] of a law at inputs [n, d]."""
    logs = np.log(inputs)  # [n, d]
    powers = -coefficients.exponents[..., None, :] * logs
    terms = np.exp(np.log(coefficients.factors)[..., None, :] + powers)
    return coefficients.offset[..., None] + terms.sum(-1)


def check_sizes(law: Law, inputs: np.ndarray) -> None:
    """Raise ValueError for inputs [n, d] from which the law cannot be fitted.

    Runs of one size count once: only another size tells an offset from a power.
    """
    num_sizes = len(np.unique(inputs, axis=0))
    if num_sizes < law.num_points:
        raise ValueError(
            f"a {law.name} law needs points of {law.num_points} different sizes, "
            f"got {num_sizes}."
        )
    fewest = min(len(np.unique(column)) for column in inputs.T)
    if fewest < MIN_SIZES:
        raise ValueError(
            f"a {law.name} law needs {MIN_SIZES} different values of each size, "
            f"got {fewest}."
        )
    if law.num_inputs > 1 and abs(np.corrcoef(np.log(inputs).T)[0, 1]) > 0.999:
        raise ValueError(
            "a joint law needs parameters and data that vary independently, got one "
            "that is a power of the other."
        )


DELTA = 1e-3  # residual from which the Huber loss is linear
WIDER = (100.0, 10.0, 1.0)  # decreasing deltas of the optimization, in DELTA
EXPONENTS = (1e-3, 20.0)  # bounds, of laws with several terms
NUM_STARTS = 3
EXACT = 1e-9  # smallest mean log residual, for the likelihood


class Fit(NamedTuple):
    """A fitted law with its residuals and information criteria."""

    law: Law
    coefficients: Coefficients
    residuals: np.ndarray  # [n] log measured - log predicted
    aic: float  # under Laplace's errors, see `criteria`
    aicc: float  # infinite where the points are too few for it

    @property
    def rms(self) -> float:
        """Root mean square of the log residuals, about a relative error."""
        return float(np.sqrt(np.mean(self.residuals**2)))


def fit(
    law: Law, inputs: np.ndarray, errors: np.ndarray, *, delta: float = DELTA
) -> Fit:
    """Fit a law to n runs by the Huber loss on log residuals.

    Args:
      inputs: [n, d] the law's inputs, positive: parameters, images or both.
      errors: [n] positive, smaller is better.
      delta: log residual from which the Huber loss is linear.
    """
    inputs, errors = np.asarray(inputs, float), np.asarray(errors, float)
    check_sizes(law, inputs)
    with one_thread():
        coefficients = get_coefficients(law, inputs, errors, delta=delta)
    residuals = np.log(errors) - np.log(predict(coefficients, inputs))
    return Fit(law, coefficients, residuals, *criteria(law, residuals))


def one_thread() -> threadpool_limits:
    """Context with one BLAS thread, faster for many tiny matrices."""
    return threadpool_limits(1, user_api="blas")


def fit_laws(
    laws: Sequence[Law], inputs: np.ndarray, errors: np.ndarray
) -> tuple[list[Fit], list[str]]:
    """Fit the laws that the runs allow: (fits, reasons why others are missing)."""
    fits, refused = [], []
    for law in laws:
        try:
            fits.append(fit(law, inputs, errors))
        except ValueError as error:
            refused.append(str(error))
    return fits, refused


def best_fit(fits: Sequence[Fit]) -> Fit:
    """Choose the fit of minimum AICc; of equal ones that of fewest coefficients."""
    return min(fits, key=lambda x: (x.aicc, x.law.num_coefficients))


def criteria(law: Law, residuals: np.ndarray) -> tuple[float, float]:
    """Akaike's information criterion, and AICc for few points.

    The likelihood is Laplace's, whose maximum the Huber loss finds up to its rounded
    corner; the scale is one more coefficient.
    """
    n, k = len(residuals), law.num_coefficients + 1
    scale = max(np.abs(residuals).mean(), EXACT)
    aic = 2 * n * (np.log(2 * scale) + 1) + 2 * k
    room = n - k - 1
    return aic, aic + 2 * k * (k + 1) / room if room > 0 else np.inf


def get_coefficients(
    law: Law,
    inputs: np.ndarray,
    errors: np.ndarray,
    *,
    delta: float = DELTA,
    num_starts: int = NUM_STARTS,
) -> Coefficients:
    """Fit the coefficients, without checking the points."""
    logs = np.log(inputs)
    center = logs.mean(0)
    logs, target = logs - center, np.log(errors)
    starts = _starts(law, logs, target)[:num_starts]
    ends = [_polish(law, logs, target, start, delta) for start in starts]
    theta, _ = min(ends, key=lambda end: end[1])
    exponents, heights, offset = _parts(law, theta)
    offset = np.exp(offset) if law.has_offset else np.zeros(())
    heights = heights + exponents * center
    factors = np.maximum(np.exp(heights), MIN_FACTOR)
    return Coefficients(exponents, factors, offset)


def _parts(law, theta):
    """Split the vector: exponents [d], log terms at the center [d], log offset []."""
    d = law.num_inputs
    return theta[:d], theta[d : 2 * d], theta[-1]


def _polish(law, logs, target, theta, delta):
    """Minimize the Huber loss by L-BFGS from `theta`, with decreasing delta."""
    d, count = law.num_inputs, law.num_coefficients
    lowest = EXPONENTS[0] if law.has_offset else -EXPONENTS[1]
    bounds = [(lowest, EXPONENTS[1])] * d + [(None, None)] * (count - d)
    options = {"maxiter": 2000, "ftol": 1e-14, "gtol": 1e-9}
    how = {"method": "L-BFGS-B", "jac": True, "bounds": bounds, "options": options}
    value = np.inf
    for wider in WIDER:
        settings = law, logs, target, delta * wider
        end = minimize(_loss_and_gradient, theta, settings, **how)
        theta, value = end.x, end.fun
    return theta, value


def _loss_and_gradient(theta, law, logs, target, delta):
    exponents, heights, offset = _parts(law, theta)
    terms = heights - exponents * logs  # [n, d]
    if law.has_offset:
        terms = np.concatenate([terms, np.full((len(terms), 1), offset)], 1)
    predicted = np.logaddexp.reduce(terms, axis=1)
    residual = predicted - target
    inner = np.clip(residual, -delta, delta)
    shares = np.exp(terms - predicted[:, None])  # of each term in the prediction
    by_term = inner @ shares
    by_exponent = -inner @ (shares[:, : law.num_inputs] * logs)
    loss = inner @ (residual - inner / 2)  # Huber's
    return loss / delta**2, np.concatenate([by_exponent, by_term]) / delta**2


def _starts(law, logs, target) -> list[np.ndarray]:
    """Initial vectors: the best of a grid over exponents, solved for the rest."""
    if not law.has_offset:
        slope, height = np.polyfit(logs[:, 0], target, 1)
        return [np.array([-slope, height])]
    grid = np.geomspace(0.02, 8.0, 40 if law.num_inputs == 1 else 16)
    tried = []
    for exponents in itertools.product(grid, repeat=law.num_inputs):
        columns = np.exp(-np.array(exponents) * logs - target[:, None])
        design = np.concatenate([columns, np.exp(-target)[:, None]], 1)
        solved, missed = nnls(design, np.ones(len(target)))  # relative residuals
        tried.append((missed, exponents, solved))
    tried.sort(key=lambda entry: entry[0])
    floor = np.log(1e-6) + target.min()  # a term of 0 could not grow again
    return [
        np.concatenate([exponents, np.log(np.maximum(solved, np.exp(floor)))])
        for _, exponents, solved in tried
    ]
