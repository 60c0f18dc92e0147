"""Scaling studies as Markdown tables and JSON."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedfr_jax.scaling.intervals import LEVEL, Replicates, interval
from fedfr_jax.scaling.study import Budgets, SeriesFit, Study
from fedfr_jax.scaling.table import Points

LAWS = (
    "series | inputs | law | exponents | {:.0%} intervals | offset E | rms | AIC | AICc"
)
HOLD_OUT_COLUMNS = (
    "series | inputs | law | measured | predicted"
    " | {:.0%} interval of the mean | inside"
)


def markdown(study: Study) -> str:
    """Format a study as Markdown tables: runs, laws, hold-out and budgets."""
    parts = ["## Runs", run_table(study.points), "## Laws", law_table(study.findings)]
    if any(finding.hold_out for finding in study.findings):
        parts += ["## The largest runs, predicted by the others", hold_out_table(study)]
    for budgets in study.budgets:
        title = f"## Budgets, by {_inputs_of(budgets.finding)}"
        parts += [title, budget_table(budgets)]
    notes = [
        f"- {_inputs_of(x)}: {reason}" for x in study.findings for reason in x.refused
    ]
    notes = dict.fromkeys(notes + [f"- {reason}" for reason in study.refused])
    if notes:
        parts += ["## Not fitted", "\n".join(notes)]
    return "\n\n".join(parts) + "\n"


def run_table(points: Points) -> str:
    """Table of the runs, as in BigFace: model, size, score."""
    labels = {"name": points.names, "series": points.series}
    columns = {name: [*x] for name, x in labels.items() if any(x)}
    numbers = {**points.sizes, **points.data}
    if points.flops is not None:
        numbers["flops"] = points.flops
    columns |= {name: [short(x) for x in values] for name, values in numbers.items()}
    values = 1 - points.errors if points.is_score else points.errors
    columns[points.metric] = [f"{x:.4f}" for x in values]
    return table(list(columns), zip(*columns.values(), strict=True))


def law_table(findings: Sequence[SeriesFit]) -> str:
    """Table of fitted laws; the one chosen by AICc is bold, with intervals."""
    rows = []
    for finding in findings:
        for fit in finding.fits:
            is_best = fit is finding.best
            name = f"**{fit.law.name}**" if is_best else fit.law.name
            exponents = ", ".join(f"{x:.3f}" for x in fit.coefficients.exponents)
            ends = _intervals(finding.replicates) if is_best else ""
            offset = f"{fit.coefficients.offset:.4g}" if fit.law.has_offset else "-"
            rows.append(
                [finding.series or "-", ", ".join(finding.axes), name, exponents, ends]
                + [offset, f"{fit.rms:.2g}", f"{fit.aic:.1f}"]
                + [f"{fit.aicc:.1f}" if np.isfinite(fit.aicc) else "too few runs"]
            )
    return table(LAWS.format(LEVEL).split(" | "), rows)


def hold_out_table(study: Study) -> str:
    """Table of predictions of held-out runs, by the law that the others choose."""
    rows = [
        [finding.series or "-", ", ".join(finding.axes), x.fit.law.name]
        + [f"{x.measured:.4g}", f"{x.predicted:.4g}"]
        + [f"{x.low:.4g} to {x.high:.4g}", "yes" if x.is_inside else "no"]
        for finding in study.findings
        if (x := finding.hold_out)
    ]
    return table(HOLD_OUT_COLUMNS.format(LEVEL).split(" | "), rows)


def budget_table(budgets: Budgets) -> str:
    """Table of the best model for each budget, and of other models of equal cost."""
    best = budgets.best[0].parameters
    shares = [f"error at {x.parameters / best:g} N" for x in budgets.equal[0]]
    head = ["FLOPs", "parameters N", "D", "error", *shares]
    rows = [
        [short(plan.flops) + ("*" if plan.flops > budgets.largest else "")]
        + [short(plan.parameters), short(plan.images), f"{plan.error:.4g}"]
        + [f"{other.error:.4g}" for other in equal]
        for plan, equal in zip(budgets.best, budgets.equal, strict=True)
    ]
    cost = f"{budgets.cost.factor:.3g} N^{budgets.cost.exponent:.3f} D FLOPs"
    note = f"A training takes {cost}. \\* more than any run took."
    return f"{note}\n\n{table(head, rows)}"


def table(head: Sequence[str], rows) -> str:
    """Format a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def short(value: float) -> str:
    """Format a large number with a unit letter.

    >>> short(1_054_671_872), short(24_025_600), short(812), short(2.5e19)
    ('1.055 B', '24.03 M', '812', '2.5e+19')
    """
    for size, letter in ((1e12, ""), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value:.3g}" if not letter else f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def as_json(study: Study) -> dict[str, Any]:
    """Convert a study to JSON."""
    return {
        "metric": study.points.metric,
        "findings": [_finding(finding) for finding in study.findings],
        "budgets": [_budget(budgets) for budgets in study.budgets],
        "refused": list(study.refused),
    }


def _inputs_of(finding: SeriesFit) -> str:
    name = " and ".join(finding.axes)
    return f"{name} of {finding.series}" if finding.series else name


def _intervals(replicates: Replicates | None) -> str:
    if replicates is None:
        return ""
    low, high = interval(replicates.coefficients.exponents)
    return ", ".join(f"{a:.3f} to {b:.3f}" for a, b in zip(low, high, strict=True))


def _finding(finding: SeriesFit) -> dict[str, Any]:
    entry = {"series": finding.series, "inputs": list(finding.axes)}
    entry |= {"runs": len(finding.inputs), "refused": list(finding.refused)}
    entry["laws"] = {fit.law.name: _fit(fit) for fit in finding.fits}
    if finding.best and finding.replicates:
        refits = finding.replicates.coefficients._asdict()
        ends = {name: np.stack(interval(x)).tolist() for name, x in refits.items()}
        entry |= {"best": finding.best.law.name, "level": LEVEL, "intervals": ends}
    if finding.hold_out:
        held_out = finding.hold_out._asdict()
        entry["held_out"] = {"law": held_out.pop("fit").law.name, **held_out}
    return entry


def _fit(fit) -> dict[str, Any]:
    entry = {name: x.tolist() for name, x in fit.coefficients._asdict().items()}
    aicc = fit.aicc if np.isfinite(fit.aicc) else None
    return {**entry, "rms": fit.rms, "aic": fit.aic, "aicc": aicc}


def _budget(budgets: Budgets) -> dict[str, Any]:
    return {
        "inputs": list(budgets.finding.axes),
        "cost": budgets.cost._asdict(),
        "largest_run": budgets.largest,
        "best": [x._asdict() for x in budgets.best],
        "equal_cost": [[x._asdict() for x in row] for row in budgets.equal],
    }
