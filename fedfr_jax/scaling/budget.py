"""How to spend a budget of operations: networks of the same cost, and the best of them.

Training takes C = c N^g D operations, c and g fitted to the runs' own: a convolution
uses a parameter at every pixel, so that C is not 6 N D as for transformers. Under a
joint law the best N at a given C is in closed form (Hoffmann et al., 2022, equation 4,
for any g).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax.scaling.laws import LEAST_FACTOR, Coefficients, predict

SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the best N, in a table of equal cost
H200_DAY = 0.3 * 989e12 * 86_400  # operations in bfloat16 at 30 % of the peak


class Cost(NamedTuple):
    """Operations of a training: factor * N^exponent * D."""

    factor: float
    exponent: float


class Plan(NamedTuple):
    """A network and a data set within a budget."""

    flops: float
    parameters: float
    images: float
    error: float  # as the law predicts


def cost_of(parameters: np.ndarray, images: np.ndarray, flops: np.ndarray) -> Cost:
    """The cost fitted to n runs by least squares of logs.

    Raises:
      ValueError: unless the runs have two sizes.
    """
    if len(np.unique(parameters)) < 2:
        raise ValueError(f"parameters must have two values, got {parameters}.")
    slope, height = np.polyfit(np.log(parameters), np.log(flops / images), 1)
    return Cost(float(np.exp(height)), float(slope))


def best_plan(law: Coefficients, cost: Cost, flops: float) -> Plan:
    """The network and number of images of least error for `flops` operations.

    Raises:
      ValueError: where larger networks do not cost more, or the runs do not show that
        parameters, or images, count.
    """
    if min(law.factors) <= LEAST_FACTOR:
        raise ValueError(
            "a law of budgets must have a term of parameters and one of images, got "
            f"factors {law.factors.tolist()}."
        )
    if cost.exponent <= 0:
        raise ValueError(f"the cost's exponent must be positive, got {cost.exponent}.")
    (alpha, beta), (a, b) = law.exponents, law.factors
    images_of_one = flops / cost.factor  # D at N = 1
    ratio = np.log(alpha * a) - np.log(beta * cost.exponent * b)
    logged = (ratio + beta * np.log(images_of_one)) / (alpha + beta * cost.exponent)
    return plan_at(law, cost, flops, float(np.exp(logged)))


def plan_at(law: Coefficients, cost: Cost, flops: float, parameters: float) -> Plan:
    """The same for a network of the given size."""
    images = flops / (cost.factor * parameters**cost.exponent)
    error = predict(law, np.array([[parameters, images]]))[0]
    return Plan(flops, parameters, images, float(error))


def equal_cost(law: Coefficients, cost: Cost, flops: float) -> list[Plan]:
    """Smaller and larger networks than the best, each for `flops` operations."""
    best = best_plan(law, cost, flops).parameters
    return [plan_at(law, cost, flops, share * best) for share in SHARES]


def budgets(flops: np.ndarray, more: Sequence[float] = ()) -> list[float]:
    """The powers of ten around what runs took, ten times the largest, and others."""
    low, high = np.floor(np.log10(flops.min())), np.ceil(np.log10(flops.max()))
    return sorted({*10.0 ** np.arange(low + 1, high + 2), *more})
