"""Scaling studies as Markdown tables and JSON."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedfr_jax.scaling.intervals import LEVEL, interval
from fedfr_jax.scaling.study import Budgets, SeriesFit, Study
from fedfr_jax.scaling.table import Points

LAWS = (
    "series | inputs | law | exponents | {:.0%} intervals | offset E | rms | AIC | AICc"
)
HOLD_OUT_COLUMNS = (
    "series | inputs | measured | predicted | {:.0%} interval of the mean | inside"
)


def markdown(of: Study) -> str:
    """Format a study as Markdown tables: runs, laws, hold-out and budgets."""
    parts = ["## Runs", run_table(of.points), "## Laws", law_table(of.findings)]
    if any(found.hold_out for found in of.findings):
        parts += ["## The largest runs, predicted by the others", hold_out_table(of)]
    for budgets in of.budgets:
        parts += [f"## Budgets, by {_where(budgets.finding)}", budget_table(budgets)]
    notes = dict.fromkeys(
        f"- {_where(found)}: {why}" for found in of.findings for why in found.refused
    )
    notes |= dict.fromkeys(f"- {why}" for why in of.refused)
    if notes:
        parts += ["## Not fitted", "\n".join(notes)]
    return "\n\n".join(parts) + "\n"


def run_table(points: Points) -> str:
    """Table of the runs, as in BigFace: model, size, score."""
    columns = {"name": points.names, "series": points.series}
    columns = {name: x for name, x in columns.items() if any(x)}
    numbers = {**points.sizes, **points.data}
    if points.flops is not None:
        numbers["flops"] = points.flops
    columns |= {name: [short(x) for x in values] for name, values in numbers.items()}
    shown = 1 - points.errors if points.is_score else points.errors
    columns[points.metric] = [f"{x:.4f}" for x in shown]
    return table(list(columns), zip(*columns.values(), strict=True))


def law_table(findings: Sequence[SeriesFit]) -> str:
    """Table of fitted laws; the one chosen by AICc is bold and has intervals."""
    rows = []
    for found in findings:
        for of in found.fits:
            is_best = of is found.best
            name = f"**{of.law.name}**" if is_best else of.law.name
            exponents = ", ".join(f"{x:.3f}" for x in of.coefficients.exponents)
            ends = _intervals(found) if is_best else ""
            offset = f"{of.coefficients.offset:.4g}" if of.law.has_offset else "-"
            rows.append(
                [found.series or "-", ", ".join(found.axes), name, exponents, ends]
                + [offset, f"{of.rms:.2g}", f"{of.aic:.1f}"]
                + [f"{of.aicc:.1f}" if np.isfinite(of.aicc) else "too few runs"]
            )
    return table(LAWS.format(LEVEL).split(" | "), rows)


def hold_out_table(of: Study) -> str:
    """Table of predictions of held-out runs, a row per series and size."""
    rows = [
        [found.series or "-", ", ".join(found.axes)]
        + [f"{held.measured:.4g}", f"{held.predicted:.4g}"]
        + [f"{held.low:.4g} to {held.high:.4g}", "yes" if held.is_inside else "no"]
        for found in of.findings
        if (held := found.hold_out)
    ]
    return table(HOLD_OUT_COLUMNS.format(LEVEL).split(" | "), rows)


def budget_table(of: Budgets) -> str:
    """Table of the best model for each budget, and of other models of equal cost."""
    shares = [
        f"error at {plan.parameters / of.best[0].parameters:g} N"
        for plan in of.equal[0]
    ]
    head = ["FLOPs", "parameters N", "D", "error", *shares]
    rows = [
        [short(plan.flops) + ("*" if plan.flops > of.largest else "")]
        + [short(plan.parameters), short(plan.images), f"{plan.error:.4g}"]
        + [f"{other.error:.4g}" for other in equal]
        for plan, equal in zip(of.best, of.equal, strict=True)
    ]
    note = f"A training takes {of.cost.factor:.3g} N^{of.cost.exponent:.3f} D FLOPs. "
    return f"{note}\\* more than any run took.\n\n{table(head, rows)}"


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


def as_json(of: Study) -> dict[str, Any]:
    """Convert a study to JSON, with the correlations of the replicates."""
    return {
        "metric": of.points.metric,
        "findings": [_finding(found) for found in of.findings],
        "budgets": [_budget(budgets) for budgets in of.budgets],
        "refused": list(of.refused),
    }


def _where(found: SeriesFit) -> str:
    name = " and ".join(found.axes)
    return f"{name} of {found.series}" if found.series else name


def _intervals(found: SeriesFit) -> str:
    low, high = interval(found.replicates.coefficients.exponents)
    return ", ".join(f"{a:.3f} to {b:.3f}" for a, b in zip(low, high, strict=True))


def _finding(found: SeriesFit) -> dict[str, Any]:
    facts = {"series": found.series, "inputs": list(found.axes)}
    facts |= {"runs": len(found.inputs), "refused": list(found.refused)}
    facts["laws"] = {of.law.name: _fit(of) for of in found.fits}
    if found.best:
        drawn = found.replicates.coefficients
        ends = [interval(values) for values in drawn]
        facts["best"] = found.best.law.name
        facts["level"] = LEVEL
        facts["intervals"] = {
            name: [low.tolist(), high.tolist()]
            for name, (low, high) in zip(drawn._fields, ends, strict=True)
        }
        facts["correlations"] = _correlations(found)
    if found.hold_out:
        facts["held_out"] = {
            name: value
            for name, value in found.hold_out._asdict().items()
            if name not in ("is_held", "fit")
        }
    return facts


def _fit(of) -> dict[str, Any]:
    facts = {name: x.tolist() for name, x in of.coefficients._asdict().items()}
    aicc = of.aicc if np.isfinite(of.aicc) else None
    return {**facts, "rms": of.rms, "aic": of.aic, "aicc": aicc}


def _correlations(found: SeriesFit) -> dict[str, Any]:
    """Correlations of the replicates' exponents, log factors and offset."""
    drawn, law = found.replicates.coefficients, found.best.law
    columns = [drawn.exponents, np.log(drawn.factors)]
    names = [
        f"{what} {axis}" for what in ("exponent", "log factor") for axis in found.axes
    ]
    if law.has_offset:
        columns, names = [*columns, drawn.offset[:, None]], [*names, "offset"]
    values = np.concatenate(columns, 1).T
    matrix = np.corrcoef(values) if values.std(1).all() else np.eye(len(values))
    return {"of": names, "matrix": matrix.tolist()}


def _budget(of: Budgets) -> dict[str, Any]:
    plan = lambda x: x._asdict()
    return {
        "inputs": list(of.finding.axes),
        "cost": of.cost._asdict(),
        "largest_run": of.largest,
        "best": [plan(x) for x in of.best],
        "equal_cost": [[plan(x) for x in row] for row in of.equal],
    }
