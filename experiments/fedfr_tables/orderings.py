"""What the tables say: a line per row, and which of the paper's orderings hold.

Pure functions of {seed: {row: {"generic", "personalized", "cost", ...}}}, as run.py
keeps it.
"""

import datetime
import json
import pathlib
import re
import subprocess

import numpy as np
import scipy.stats

HERE = pathlib.Path(__file__).resolve().parent
# In the order of the paper's tables; a row that is not here follows.
ROWS = (
    "pretrained",
    "local",
    "local_equal",
    "local_negatives",
    "fedavg",
    "fedavg_equal",
    "spreadout",
    "fedface",
    "moon",
    "branch_only",
    "no_images",
    "hard_negatives",
    "contrastive",
    "no_contrastive",
    "fedfr",
    "finetune",
    "distill",
    "cosface_branch",
    "central",
)
# (what the paper finds, evaluator, the better row, the worse row)
CLAIMS = (
    ("FedAvg helps personalized", "personalized", "fedavg", "pretrained"),
    ("FedAvg hurts generic", "generic", "pretrained", "fedavg"),
    ("hard negatives help generic", "generic", "hard_negatives", "fedavg"),
    ("hard negatives help personalized", "personalized", "hard_negatives", "fedavg"),
    ("contrastive helps generic", "generic", "contrastive", "hard_negatives"),
    ("contrastive costs personalized", "personalized", "hard_negatives", "contrastive"),
    ("the branch helps personalized", "personalized", "fedfr", "contrastive"),
    ("the branch restores personalized", "personalized", "fedfr", "hard_negatives"),
    ("FedFR beats its start, generic", "generic", "fedfr", "pretrained"),
    ("FedFR beats FedFace", "personalized", "fedfr", "fedface"),
    ("FedFR beats MOON", "personalized", "fedfr", "moon"),
    ("BCE beats a CosFace branch", "personalized", "fedfr", "cosface_branch"),
    ("a CosFace branch beats KD", "personalized", "cosface_branch", "distill"),
    ("KD beats fine-tuning", "personalized", "distill", "finetune"),
    ("central 10k is the upper bound", "personalized", "central", "fedfr"),
    # What the paper does not ask: equal steps, no images, and each term by itself.
    ("federation helps without images", "personalized", "fedavg", "local"),
    ("FedFR beats its branch alone", "personalized", "fedfr", "branch_only"),
    ("FedFR beats FedAvg of equal steps", "personalized", "fedfr", "fedavg_equal"),
    ("FedFR beats local of equal steps", "personalized", "fedfr", "local_equal"),
    ("FedFR beats local hard negatives", "personalized", "fedfr", "local_negatives"),
    (
        "federation helps hard negatives",
        "personalized",
        "hard_negatives",
        "local_negatives",
    ),
    ("images help at equal steps", "personalized", "hard_negatives", "fedavg_equal"),
    (
        "images help at equal steps, generic",
        "generic",
        "hard_negatives",
        "fedavg_equal",
    ),
    ("the branch helps without images", "personalized", "branch_only", "fedavg"),
    (
        "the branch helps with images",
        "personalized",
        "no_contrastive",
        "hard_negatives",
    ),
    ("contrastive helps beside the branch", "personalized", "fedfr", "no_contrastive"),
    ("contrastive helps FedFR's generic", "generic", "fedfr", "no_contrastive"),
)
SIGNIFICANT = 0.05
SAME = ("the branch leaves generic as it is", "generic", "fedfr", "contrastive")
TOLERANCE = 0.01  # a mean rate that changes by less has not changed


def columns(runs: dict) -> list[tuple[str, str]]:
    """(evaluator, metric) of every number that all rows have, strict rates first."""
    rows = [row for seed in runs.values() for row in seed.values()]
    name_and_rate = lambda metric: (metric.split("=")[0], float(metric.split("=")[1]))
    order = lambda metric: (0, *name_and_rate(metric)) if "=" in metric else (1, metric)
    evaluators = ("generic", "personalized")
    common = {p: set.intersection(*(set(row[p]) for row in rows)) for p in evaluators}
    return [(p, m) for p in evaluators for m in sorted(common[p], key=order)]


def in_order(names) -> list[str]:
    """Rows as ROWS lists them, others behind by the number that they begin with.

    >>> in_order(["20 epochs", "8 epochs", "1e-3 fedavg", "2_5 fedfr", "fedfr"])
    ['fedfr', '1e-3 fedavg', '2_5 fedfr', '8 epochs', '20 epochs']
    """
    place = {name: i for i, name in enumerate(ROWS)}
    key = lambda name: (place.get(name, len(ROWS)), number_of(name), name)
    return sorted(names, key=key)


def number_of(name: str) -> float:
    """What a row's name begins with, "_" for a dot; 0 without a number."""
    found = re.match(r"[\d_]+(e-?\d+)?", name)
    return float(found.group().replace("_", ".")) if found else 0.0


def rows_of_all(runs: dict) -> list[str]:
    """Rows that every seed has."""
    first, *others = runs.values()
    return [name for name in first if all(name in rows for rows in others)]


def values_of(runs: dict, row: str, evaluator: str, metric: str) -> np.ndarray:
    """[seeds]."""
    return np.array([rows[row][evaluator][metric] for rows in runs.values()])


def leaders(runs: dict, evaluator: str, metric: str) -> dict[str, float]:
    """{row: its lead in points} of the rows whose mean is above FedFR's."""
    means = {
        row: 100 * values_of(runs, row, evaluator, metric).mean()
        for row in in_order(rows_of_all(runs))
    }
    return {
        row: mean - means["fedfr"]
        for row, mean in means.items()
        if mean > means["fedfr"]
    }


def above(runs: dict) -> str:
    """Markdown: the rows above FedFR at every rate, and by how many points."""
    lines = ["| rate | rows above fedfr, points |", "|---|---|"]
    for evaluator, metric in columns(runs):
        found = leaders(runs, evaluator, metric).items()
        cell = ", ".join(f"{row} +{lead:.1f}" for row, lead in found)
        lines.append(f"| {evaluator} {metric} | {cell or 'none'} |")
    return "\n".join(lines)


def mean_rate(runs: dict, row: str, evaluator: str) -> np.ndarray:
    """Mean over an evaluator's rates (TAR@FAR and TPIR@FPIR, not accuracy), [seeds]."""
    rates = [m for p, m in columns(runs) if p == evaluator and "@" in m]
    return np.mean([values_of(runs, row, evaluator, m) for m in rates], axis=0)


def spread(values: np.ndarray) -> str:
    """Mean and sample deviation over seeds, in percent."""
    deviation = f" ± {100 * values.std(ddof=1):.1f}" if len(values) > 1 else ""
    return f"{100 * values.mean():.1f}{deviation}"


def core_seconds(runs: dict, row: str) -> float:
    """Mean seconds of all cores together; other programs beside a run do not count."""
    costs = [rows[row]["cost"] for rows in runs.values()]
    known = [cost["core_seconds"] for cost in costs if "core_seconds" in cost]
    return float(np.mean(known)) if known else float("nan")


def mean_cost(runs: dict, row: str, name: str) -> float:
    """Mean over seeds of hard_negatives, images or steps of a client; 0 without."""
    costs = [rows[row]["cost"] for rows in runs.values()]
    return float(np.mean([cost.get(name, 0.0) for cost in costs]))


def table(runs: dict, *, has_costs: bool = True) -> str:
    """Markdown: a line per row, mean and standard deviation in percent."""
    names = in_order(rows_of_all(runs))
    heads = [f"{p} {m}" for p, m in columns(runs)]
    heads += ["HN", "images", "steps", "core s"] if has_costs else []
    lines = ["| row | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name in names:
        cells = [spread(values_of(runs, name, p, m)) for p, m in columns(runs)]
        if has_costs:
            seconds = f"{core_seconds(runs, name):.0f}".replace("nan", "-")
            costs = ("hard_negatives", "images", "steps")
            cells += [f"{mean_cost(runs, name, cost):.0f}" for cost in costs]
            cells.append(seconds)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def p_value(gain: np.ndarray) -> float:
    """Two-sided, of a paired t-test of differences [seeds] against 0; 1 for one seed.

    Differences that are all the same are taken for no chance: p is 0, or 1 at zero.
    """
    if len(gain) < 2 or not gain.any():
        return 1.0
    if np.ptp(gain) == 0:
        return 0.0
    return float(scipy.stats.ttest_1samp(gain, 0.0).pvalue)


def verdict(gain: np.ndarray) -> str:
    """Whether a difference is significant: yes, no (the other way round), unclear."""
    if p_value(gain) >= SIGNIFICANT:
        return "unclear"
    return "yes" if gain.mean() > 0 else "no"


def claims(runs: dict) -> str:
    """Markdown: the paper's orderings, on the mean over an evaluator's rates.

    One is only said to hold, or not to, where a paired t-test over the seeds has
    p < SIGNIFICANT; no correction is made for the number of lines.
    """
    known = set(rows_of_all(runs))
    lines = [
        "| claim | evaluator | rows | difference in points, each seed | p | holds |",
        "|---|---|---|---|---|---|",
    ]
    for claim in (*CLAIMS, SAME):
        text, evaluator, better, worse = claim
        if not {better, worse} <= known:
            continue
        gain = mean_rate(runs, better, evaluator) - mean_rate(runs, worse, evaluator)
        tested = TOLERANCE - np.abs(gain) if claim is SAME else gain
        shown = ", ".join(f"{100 * g:+.1f}" for g in gain)
        rows = f"{better} - {worse}"
        chance = f"{p_value(tested):.4f}" if len(gain) > 1 else "-"
        found = f"{chance} | {verdict(tested)}"
        lines.append(f"| {text} | {evaluator} | {rows} | {shown} | {found} |")
    return "\n".join(lines)


def write_results(path: pathlib.Path, name: str, runs: dict, **notes) -> dict:
    """Put rows into one part of results.json, curves left out, lists in one line.

    Returns:
      The part's {seed: {row: ...}}: rows and seeds that were not run again stay.
    """
    results = json.loads(path.read_text()) if path.exists() else {}
    kept = results.get(name, {}).get("seeds", {})
    for seed, rows in runs.items():
        for row, found in rows.items():
            new = {k: v for k, v in found.items() if k != "roc"}
            kept.setdefault(seed, {})[row] = new
    results[name] = {"made": made(kept), "seeds": kept, **notes}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(readable(results, sort_keys=True))
    return kept


def readable(results: dict, **options) -> str:
    """JSON with a line for each entry, and one for each list of plain values."""
    text = json.dumps(results, indent=1, **options)
    flat = lambda found: re.sub(r"\s+", " ", found[0])
    return re.sub(r"\[[^\[\]{}]*\]", flat, text) + "\n"


def write_between(path: pathlib.Path, name: str, text: str) -> None:
    """Replace what stands between a part's two markers."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before = path.read_text() if path.exists() else ""
    if start not in before:
        before += f"\n{start}\n{end}\n"
    head, _, rest = before.partition(start)
    path.write_text(f"{head}{start}\n{text}\n{end}{rest.partition(end)[2]}")


def made(runs: dict) -> str:
    """Dates and commits of all rows of all seeds, each once."""
    stamps = {row["made"] for rows in runs.values() for row in rows.values()}
    return "; ".join(sorted(stamps))


def provenance() -> str:
    """Date and commit of a row; "-dirty" when code or configs differ from it."""
    git = lambda *words: subprocess.run(
        ["git", "-C", str(HERE), *words], capture_output=True, text=True
    ).stdout.strip()
    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    if git("diff", "HEAD", "--name-only", "--", ":/*.py"):
        commit += "-dirty"
    return f"{datetime.date.today().isoformat()}, commit {commit}"
