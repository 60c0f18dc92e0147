"""What the runs say: laws with intervals, and a table for each of BigFace's claims.

Pure functions of {part: {seed: {name: row}}}, as run.py keeps it.
"""

import json
import pathlib
from collections.abc import Iterator, Mapping

import numpy as np
from orderings import made, p_value, verdict
from scaling_cells import DISTILLED, PARTS, SCRATCH, WIDTHS

from fedfr_jax.scaling import Points, Study, points, study
from fedfr_jax.scaling.intervals import NUM_RESAMPLES, hold_out
from fedfr_jax.scaling.laws import POWER, SATURATING
from fedfr_jax.scaling.report import (
    budget_table,
    hold_out_table,
    law_table,
    short,
    table,
)

TAR = "tar@far=1e-02"
MASKED, STANDARD = "mfr_masked_fnmr@far=1e-02", "mfr_standard_fnmr@far=1e-02"
SCORE = "mfr_score@far=1e-02"  # 0.25 masked + 0.75 standard, lower is better
# title: the column that is judged, and whether larger is better
LAWS = {
    "error on unseen people, 1 - TAR at FAR 0.01": (TAR, True),
    "error with masks, masked FNMR at FPR 0.01": (MASKED, False),
}
ERRORS = {"masked FNMR": MASKED, "standard FNMR": STANDARD, "MFR score": SCORE}
CLAIMS = (  # part, what is claimed, the row of the lower error, the other, the error
    ("masks", "masks help with masks", "ratio 0.35", "ratio 0", "masked FNMR"),
    ("masks", "masks cost without", "ratio 0", "ratio 0.35", "standard FNMR"),
    ("masks", "more masks help with masks", "ratio 0.5", "ratio 0.35", "masked FNMR"),
    ("masks", "more masks cost without", "ratio 0.35", "ratio 0.5", "standard FNMR"),
    ("moe", "plain beats experts", "plain", "moe", "MFR score"),
    ("moe", "a gate has to be taught", "moe", "moe, gate untaught", "MFR score"),
)
SIZES = ("sizes", "data", "omniglot", "lfw")
SMALL = WIDTHS[:4]  # whose law predicts the larger ones
STAGE = "pretrained/generic/"
FACTS = (
    "params_backbone",
    "params_with_head",
    "num_images",
    "num_images_seen",
    "num_identities",
)
Results = dict[str, dict[str, dict[str, dict]]]


def kept(cell, row: dict) -> dict:
    """What results.json keeps of a sweep's row."""
    metrics = {
        key.removeprefix(STAGE): value
        for key, value in row.items()
        if key.startswith(STAGE)
    }
    facts = {key: row[key] for key in (*FACTS, "flops")}
    cost = {key: row[key] for key in ("seconds", "core_seconds")}
    about = {"made": row["made"], "series": cell.series, "run": row["run"]}
    return {**about, **facts, "generic": metrics, "cost": cost}


def read(path: pathlib.Path) -> Results:
    """Results by part, in the order of PARTS."""
    found = json.loads(path.read_text())
    return {part: found[part]["seeds"] for part in PARTS if part in found}


def in_common(results: Results, *parts: str) -> Results:
    """Some parts, of the seeds that all of them have."""
    of = {part: results.get(part, {}) for part in parts}
    seeds = set.intersection(*map(set, of.values()))
    return {
        part: {seed: rows for seed, rows in found.items() if seed in seeds}
        for part, found in of.items()
    }


def rows_of(results: Results, *parts: str) -> list[dict]:
    """Rows as tables of runs have them, each run once."""
    found = {}
    for part in parts:
        for rows in results.get(part, {}).values():
            for name, row in rows.items():
                flat = {"name": name, **row["generic"]}
                flat |= {key: row[key] for key in ("series", *FACTS, "flops")}
                found[row["run"]] = flat
    return list(found.values())


def points_of(rows: list[dict], metric: str, is_score: bool) -> Points | None:
    """The rows that have a metric; None without two sizes."""
    rows = [row for row in rows if row.get(metric) is not None]
    if len({row["params_backbone"] for row in rows}) < 2:
        return None
    return points(rows, metric, is_score=is_score)


def studies(results: Results, draws: int = NUM_RESAMPLES) -> dict[str, Study]:
    """The laws in size, by title."""
    rows, found = rows_of(results, *SIZES), {}
    for title, (metric, is_score) in LAWS.items():
        judged = points_of(rows, metric, is_score)
        if judged:
            found[title] = study(judged, draws=draws)
    return found


def law_text(laws: Mapping[str, Study]) -> Iterator[str]:
    """Tables of exponents, of the largest run as the others predict it, of budgets."""
    for title, of in laws.items():
        yield f"### Laws of the {title}"
        yield law_table(of.findings)
        if any(found.hold_out for found in of.findings):
            yield "The largest run, predicted by the others:"
            yield hold_out_table(of)
        for budgets in of.budgets:
            if budgets.finding.axes[0] == "params_backbone":
                yield "Budgets, by the joint law in parameters of the backbone:"
                yield budget_table(budgets)
        refused = {why for found in of.findings for why in found.refused}
        for why in sorted({*refused, *of.refused}):
            yield f"Not fitted: {why}"


def far_table(results: Results, draws: int = NUM_RESAMPLES) -> str:
    """Each of the larger networks, predicted by the law that the four smallest choose.

    They see neither the error nor the number of runs of what they predict.
    """
    rows, lines = rows_of(results, "sizes"), []
    for title, (metric, is_score) in LAWS.items():
        for width in WIDTHS[len(SMALL) :]:
            names = {f"w{w}" for w in (*SMALL, width)}
            of = points_of([x for x in rows if x["name"] in names], metric, is_score)
            inputs = of.sizes["params_backbone"][:, None]
            found = hold_out((POWER, SATURATING), inputs, of.errors, draws=draws)
            figures = [f"{found.measured:.4f}", f"{found.predicted:.4f}"]
            figures += [f"{found.low:.4f} to {found.high:.4f}"]
            is_inside = "yes" if found.is_inside else "no"
            lines.append([title, f"w{width}", found.fit.law.name, *figures, is_inside])
    head = ["error", "network", "law", "measured", "predicted", "90 % interval"]
    return table([*head, "inside"], lines)


def values_of(results: Results, part: str, name: str, metric: str) -> np.ndarray:
    """[seeds] of a row."""
    found = [rows[name] for rows in results.get(part, {}).values() if name in rows]
    return np.array([row["generic"][metric] for row in found])


def spread(values: np.ndarray) -> str:
    """Mean and sample deviation over seeds."""
    deviation = f" ± {values.std(ddof=1):.4f}" if len(values) > 1 else ""
    return f"{values.mean():.4f}{deviation}" if len(values) else "-"


def size_table(results: Results) -> str:
    """A line per network of every data set: its size, its cost, its error."""
    head = ["data", "network", "num_images", "params_backbone", "with classes", "FLOPs"]
    head += ["core s", "1 - TAR", "masked FNMR", "MFR score"]
    lines = []
    for part in SIZES:
        for cell in PARTS[part]:
            rows = [r[cell.name] for r in results.get(part, {}).values()]
            if not rows:
                continue
            sizes = ("num_images", "params_backbone", "params_with_head")
            numbers = [short(rows[0][key]) for key in sizes]
            seconds = np.mean([row["cost"]["core_seconds"] for row in rows])
            numbers += [f"{rows[0]['flops']:.2g}", f"{seconds:.0f}"]
            cells = [spread(1 - values_of(results, part, cell.name, TAR))]
            if MASKED in rows[0]["generic"]:
                for metric in (MASKED, SCORE):
                    cells.append(spread(values_of(results, part, cell.name, metric)))
            else:
                cells += ["-", "-"]
            lines.append([cell.data, cell.name, *numbers, *cells])
    return table(head, lines)


def distill_table(results: Results) -> str:
    """The gain of every student, in percent of its score alone, seed by seed."""
    results = in_common(results, "sizes", "distilled")
    head = ["student", "metric", "alone", "distilled", "gain, each seed", "p", "holds"]
    lines = []
    for cell in PARTS["distilled"]:
        for what, metric in (("1 - TAR", TAR), ("MFR score", SCORE)):
            alone, other = (
                values_of(results, part, cell.name, metric)
                for part in ("sizes", "distilled")
            )
            if not len(other) or len(alone) != len(other):
                continue
            if metric == TAR:
                alone, other = 1 - alone, 1 - other
            gain = (alone - other) / alone
            shown = ", ".join(f"{100 * x:+.1f} %" for x in gain)
            scores = [spread(alone), spread(other)]
            lines.append([cell.name, what, *scores, shown, *tested(gain)])
    return table(head, lines)


def score_table(results: Results, part: str) -> str:
    """A line per row of a part: size, masked and standard error, score."""
    head = ["network", "parameters", "FLOPs", "masked FNMR", "standard FNMR"]
    lines = []
    for cell in PARTS[part]:
        rows = [r[cell.name] for r in results.get(part, {}).values() if cell.name in r]
        if rows:
            sizes = [short(rows[0]["params_backbone"]), f"{rows[0]['flops']:.2g}"]
            scores = [
                spread(values_of(results, part, cell.name, metric))
                for metric in (MASKED, STANDARD, SCORE)
            ]
            lines.append([cell.name, *sizes, *scores])
    return table([*head, "MFR score"], lines)


def tested(gain: np.ndarray) -> list[str]:
    """p and verdict of a difference [seeds]; "-" of one seed."""
    return [f"{p_value(gain):.4f}", verdict(gain)] if len(gain) > 1 else ["-", "-"]


def claim_table(results: Results) -> str:
    """Claims about masks and experts, by the seeds that have both rows."""
    head = ["claim", "rows", "error", "difference in points, each seed", "p", "holds"]
    lines = []
    for part, claim, lower, higher, what in CLAIMS:
        found = [rows for rows in results.get(part, {}).values() if lower in rows]
        pairs = [rows for rows in found if higher in rows]
        error = lambda rows, name, what=what: rows[name]["generic"][ERRORS[what]]
        gain = np.array([error(rows, higher) - error(rows, lower) for rows in pairs])
        if len(gain):
            shown = ", ".join(f"{100 * x:+.1f}" for x in gain)
            lines.append([claim, f"{higher} - {lower}", what, shown, *tested(gain)])
    return table(head, lines)


def text(results: Results, laws: Mapping[str, Study]) -> str:
    """What stands between the markers of RESULTS.md."""
    stamps = {made(seeds) for seeds in results.values()}
    stamps = "; ".join(sorted({stamp for x in stamps for stamp in x.split("; ")}))
    parts = [stamps]
    if any(part in results for part in SIZES):
        parts += ["### Sizes", size_table(results), *law_text(laws)]
    if "sizes" in results:
        parts += ["### Predicted by the four smallest", far_table(results)]
    if "distilled" in results:
        parts += [f"### {SCRATCH.title()} and {DISTILLED}", distill_table(results)]
    for part, title in (
        ("masks", "Share of masked images"),
        ("moe", "Plain and experts"),
        ("teachers", "A deep and a shallow teacher"),
    ):
        if part in results:
            parts += [f"### {title}", score_table(results, part)]
    if results.keys() & {claim[0] for claim in CLAIMS}:
        parts += ["### Masks and experts, seed by seed", claim_table(results)]
    return "\n\n".join(part for part in parts if part)
