"""Every law that a table of runs allows, and why the others do not fit."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedfr_jax.scaling.budget import Cost, Plan, best_plan, budgets, cost_of, equal_cost
from fedfr_jax.scaling.fit import Fit, best, fit
from fedfr_jax.scaling.intervals import (
    DRAWS,
    HoldOut,
    Replicates,
    hold_out,
    replicates,
)
from fedfr_jax.scaling.laws import JOINT, POWER, SATURATING, Law
from fedfr_jax.scaling.table import Points


class Finding(NamedTuple):
    """What the runs of one series say of one definition of size."""

    series: str
    axes: tuple[str, ...]  # the columns that are the inputs
    points: Points  # the runs that are fitted
    inputs: np.ndarray  # [n, d] of them
    fits: tuple[Fit, ...]
    refused: tuple[str, ...]  # why laws could not be fitted, or nothing held out
    best: Fit | None
    replicates: Replicates | None  # of the best
    held: HoldOut | None  # by the best law


class Budgets(NamedTuple):
    """What a joint law says of budgets."""

    finding: Finding
    cost: Cost
    largest: float  # operations of the largest run: beyond it is extrapolation
    best: list[Plan]  # one per budget
    equal: list[list[Plan]]  # of equal cost, for each budget


class Study(NamedTuple):
    """All findings of a table."""

    points: Points
    data: str  # the column that counts as D
    findings: tuple[Finding, ...]
    budgets: tuple[Budgets, ...]
    refused: tuple[str, ...]  # why there are no budgets


def study(
    points: Points,
    *,
    data: str = "images",
    seed: int = 0,
    draws: int = DRAWS,
    more_budgets: Sequence[float] = (),
) -> Study:
    """Fit every law to every series, by every definition of parameters.

    Laws of one input take the runs that have most of the other: those of N the runs on
    the largest D, and those of D the runs of the largest N.

    Args:
      data: the column that counts as D; it may be missing.
      seed, draws: of the intervals, see `replicates`.
      more_budgets: operations, beside the powers of ten around the runs' own.
    """
    findings, planned, refused = [], [], []
    for series in dict.fromkeys(points.series):
        own = points.of(np.array([name == series for name in points.series]))
        for axes, laws in _axes(own, data):
            found = _finding(own, series, axes, laws, data, seed, draws)
            findings.append(found)
            if laws != (JOINT,) or not found.best:
                continue
            if own.flops is None:
                refused.append("budgets must have the column flops, got none.")
                continue
            try:
                planned.append(_budgets(found, own.flops, more_budgets))
            except ValueError as error:
                refused.append(str(error))
    return Study(points, data, tuple(findings), tuple(planned), tuple(refused))


def _axes(points, data) -> list[tuple[tuple[str, ...], tuple[Law, ...]]]:
    """Inputs worth a fit, each with its laws."""
    varies = lambda x: len(np.unique(x)) > 1
    amount = points.data.get(data)
    has_data = amount is not None and varies(amount)
    sizes = [name for name, x in points.sizes.items() if varies(x)]
    single = [(name,) for name in sizes] + ([(data,)] if has_data else [])
    both = [(name, data) for name in sizes] if has_data else []
    ones = [(axes, (POWER, SATURATING)) for axes in single]
    return ones + [(axes, (JOINT,)) for axes in both]


def _column(points, name):
    return points.sizes[name] if name in points.sizes else points.data[name]


def _most_of_the_other(points: Points, axis: str, data: str) -> Points:
    """The runs that are largest in what `axis` does not measure.

    A law of N is of one size of the data: most by `data`, and among those by every
    other column. A law of D is of one network, the largest by the first definition; the
    other columns of data and the weights of classes may grow with D.
    """
    if axis in points.sizes:
        others = sorted(points.data, key=lambda name: name != data)
    else:
        others = list(points.sizes)[:1]
    for name in others:
        values = _column(points, name)
        points = points.of(values == values.max())
    return points


def _finding(points, series, axes, laws, data, seed, draws) -> Finding:
    """Fit the laws to the inputs `axes`."""
    if len(axes) == 1:
        points = _most_of_the_other(points, axes[0], data)
    inputs = np.stack([_column(points, name) for name in axes], 1)
    fits, refused = [], []
    for law in laws:
        try:
            fits.append(fit(law, inputs, points.errors))
        except ValueError as error:
            refused.append(str(error))
    chosen = best(fits) if fits else None
    around = chosen and replicates(chosen, inputs, seed=seed, draws=draws)
    held = None
    if chosen:
        try:
            held = hold_out(chosen.law, inputs, points.errors, seed=seed, draws=draws)
        except ValueError as error:
            refused.append(f"without the largest runs, {error}")
    return Finding(
        series=series,
        axes=axes,
        points=points,
        inputs=inputs,
        fits=tuple(fits),
        refused=tuple(refused),
        best=chosen,
        replicates=around,
        held=held,
    )


def _budgets(found: Finding, flops: np.ndarray, more: Sequence[float]) -> Budgets:
    """Tables of a joint law whose runs took `flops` [n]."""
    cost = cost_of(*found.inputs.T, flops)
    law, spent = found.best.coefficients, budgets(flops, more)
    return Budgets(
        finding=found,
        cost=cost,
        largest=float(flops.max()),
        best=[best_plan(law, cost, flops) for flops in spent],
        equal=[equal_cost(law, cost, flops) for flops in spent],
    )
