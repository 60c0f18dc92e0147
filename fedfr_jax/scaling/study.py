"""Scaling studies: all laws that fit a table of runs, and compute budgets.

Training takes C = c N^g D FLOPs, c and g fitted to those of the runs: a convolution
uses a parameter at every pixel, so that C is not 6 N D as for transformers. Under a
joint law the best N at a given C is in closed form (Hoffmann et al., 2022, equation 4,
for any g).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax.ranges import Count
from fedfr_jax.scaling.intervals import (
    NUM_RESAMPLES,
    HoldOut,
    Replicates,
    hold_out,
    replicates,
)
from fedfr_jax.scaling.laws import (
    JOINT,
    MIN_FACTOR,
    POWER,
    SATURATING,
    Coefficients,
    Fit,
    Law,
    best_fit,
    fit_laws,
    predict,
)
from fedfr_jax.scaling.table import Points
from fedfr_jax.schema import checked

SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the best N, in a table of equal cost
H200_DAY = 0.3 * 989e12 * 86_400  # operations in bfloat16 at 30 % of the peak


class Cost(NamedTuple):
    """FLOPs of a training: factor * N^exponent * D."""

    factor: float
    exponent: float


class Plan(NamedTuple):
    """Model size and number of images within a budget."""

    flops: float
    parameters: float
    images: float
    error: float  # as the law predicts


def fit_cost(parameters: np.ndarray, images: np.ndarray, flops: np.ndarray) -> Cost:
    """Fit the cost of n runs by least squares in logs."""
    if len(np.unique(parameters)) < 2:
        raise ValueError(
            f"parameters must have at least two different values, got {parameters}."
        )
    slope, height = np.polyfit(np.log(parameters), np.log(flops / images), 1)
    return Cost(float(np.exp(height)), float(slope))


def best_plan(law: Coefficients, cost: Cost, flops: float) -> Plan:
    """Find the model size and number of images of least error for `flops`."""
    if min(law.factors) <= MIN_FACTOR:
        raise ValueError(
            "a law for budgets needs a term of parameters and one of images, got "
            f"factors {law.factors.tolist()}."
        )
    if cost.exponent <= 0:
        raise ValueError(
            f"the exponent of the cost must be positive, got {cost.exponent}."
        )
    (alpha, beta), (a, b) = law.exponents, law.factors
    images_of_one = flops / cost.factor  # D at N = 1
    ratio = np.log(alpha * a) - np.log(beta * cost.exponent * b)
    logged = (ratio + beta * np.log(images_of_one)) / (alpha + beta * cost.exponent)
    return plan_for_size(law, cost, flops, float(np.exp(logged)))


def plan_for_size(
    law: Coefficients, cost: Cost, flops: float, parameters: float
) -> Plan:
    """Number of images and error for a given model size and budget."""
    images = flops / (cost.factor * parameters**cost.exponent)
    error = predict(law, np.array([[parameters, images]]))[0]
    return Plan(flops, parameters, images, float(error))


def equal_cost_plans(law: Coefficients, cost: Cost, flops: float) -> list[Plan]:
    """Plans for smaller and larger models than the best, at equal cost."""
    best = best_plan(law, cost, flops).parameters
    return [plan_for_size(law, cost, flops, share * best) for share in SHARES]


def budgets(flops: np.ndarray, more: Sequence[float] = ()) -> list[float]:
    """Powers of ten around the runs' budgets, ten times the largest, and `more`."""
    low, high = np.floor(np.log10(flops.min())), np.ceil(np.log10(flops.max()))
    return sorted({*10.0 ** np.arange(low + 1, high + 2), *more})


class SeriesFit(NamedTuple):
    """Fits of one series of runs, by one definition of size."""

    series: str
    axes: tuple[str, ...]  # the columns that are the inputs
    points: Points  # the runs that are fitted
    inputs: np.ndarray  # [n, d] of them
    fits: tuple[Fit, ...]
    refused: tuple[str, ...]  # reasons for missing fits and hold-outs
    best: Fit | None
    replicates: Replicates | None  # of the best
    hold_out: HoldOut | None  # by the law of the other runs


class Budgets(NamedTuple):
    """Best plans for several budgets under a joint law."""

    finding: SeriesFit
    cost: Cost
    largest: float  # operations of the largest run: beyond it is extrapolation
    best: list[Plan]  # one per budget
    equal: list[list[Plan]]  # of equal cost, for each budget


class Study(NamedTuple):
    """All fits and budgets of a table of runs."""

    points: Points
    data: str  # the column that counts as D
    findings: tuple[SeriesFit, ...]
    budgets: tuple[Budgets, ...]
    refused: tuple[str, ...]  # reasons for missing budgets


@checked
def study(
    points: Points,
    *,
    data: str = "num_images",
    seed: int = 0,
    draws: Count = NUM_RESAMPLES,
    more_budgets: Sequence[float] = (),
) -> Study:
    """Fit every law to every series, by every definition of model size.

    Laws of N are fitted to the runs on the largest D, laws of D to the runs of the
    largest N.

    Args:
      data: the column that counts as D; it may be missing.
      seed, draws: of the intervals, see `replicates`.
      more_budgets: FLOPs, besides the powers of ten around those of the runs.
    """
    findings, plans, refused = [], [], []
    for series in dict.fromkeys(points.series):
        runs = points.take(np.array([name == series for name in points.series]))
        for axes, laws in _axes(runs, data):
            finding = _finding(runs, series, axes, laws, data, seed, draws)
            findings.append(finding)
            if laws == (JOINT,) and finding.best:
                try:
                    plans.append(_budgets(finding, finding.best, runs, more_budgets))
                except ValueError as error:
                    refused.append(str(error))
    return Study(points, data, tuple(findings), tuple(plans), tuple(refused))


def _axes(points, data) -> list[tuple[tuple[str, ...], tuple[Law, ...]]]:
    """Inputs that vary among the runs, each with the laws to fit."""
    varies = lambda x: len(np.unique(x)) > 1
    amount = points.data.get(data)
    has_data = amount is not None and varies(amount)
    sizes = [name for name, x in points.sizes.items() if varies(x)]
    single = [(name,) for name in sizes] + ([(data,)] if has_data else [])
    pairs = [(name, data) for name in sizes] if has_data else []
    of_one_input = [(axes, (POWER, SATURATING)) for axes in single]
    return of_one_input + [(axes, (JOINT,)) for axes in pairs]


def columns(points: Points) -> dict[str, np.ndarray]:
    """All inputs of the runs, {column: [n]}."""
    return {**points.sizes, **points.data}


def _take_largest(points: Points, axis: str, data: str) -> Points:
    """Runs that are largest in the inputs other than `axis`.

    A law of N is of one data set: the largest by `data`, then by every other column. A
    law of D is of one network, the largest by the first definition; other columns of
    data and the class vectors may grow with D.
    """
    if axis in points.sizes:
        other_inputs = sorted(points.data, key=lambda name: name != data)
    else:
        other_inputs = list(points.sizes)[:1]
    for name in other_inputs:
        values = columns(points)[name]
        points = points.take(values == values.max())
    return points


def _finding(points, series, axes, laws, data, seed, draws) -> SeriesFit:
    """Fit the laws to the inputs `axes`."""
    if len(axes) == 1:
        points = _take_largest(points, axes[0], data)
    inputs = np.stack([columns(points)[name] for name in axes], 1)
    fits, refused = fit_laws(laws, inputs, points.errors)
    best, refits, held_out = None, None, None
    if fits:
        best = best_fit(fits)
        refits = replicates(best, inputs, seed=seed, draws=draws)
        try:
            held_out = hold_out(laws, inputs, points.errors, seed=seed, draws=draws)
        except ValueError as error:
            refused.append(f"without the largest runs, {error}")
    return SeriesFit(
        series=series,
        axes=axes,
        points=points,
        inputs=inputs,
        fits=tuple(fits),
        refused=tuple(refused),
        best=best,
        replicates=refits,
        hold_out=held_out,
    )


def _budgets(
    finding: SeriesFit, best: Fit, runs: Points, more: Sequence[float]
) -> Budgets:
    """Plans by the joint law `best` of the runs."""
    if (flops := runs.flops) is None:
        raise ValueError("budgets must have the column flops, got none.")
    parameters, images = finding.inputs.T
    cost = fit_cost(parameters, images, flops)
    law, all_flops = best.coefficients, budgets(flops, more)
    return Budgets(
        finding=finding,
        cost=cost,
        largest=float(flops.max()),
        best=[best_plan(law, cost, flops) for flops in all_flops],
        equal=[equal_cost_plans(law, cost, flops) for flops in all_flops],
    )
