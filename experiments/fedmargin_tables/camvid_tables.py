"""CamVid's part of FedMargin's tables: numbers, curves and test images."""

import pathlib
from statistics import mean, pstdev

import tables
from orderings import write_between

CENTRAL, NAME = "central", tables.CAMVID
FEATURES = {  # curves, of the one network
    "amm": "AMM",
    "mmd": "MMD^2 to central",
    "softmax_entropy": "softmax entropy, nats",
}
TOLD = {"generic": ("mIoU, %", 100, 1), "softmax_entropy": ("entropy", 1, 3)}


def line(run: dict) -> str:
    """One run in a few words."""
    end = "diverged" if "diverged" in run else f"mIoU {run['curve'][-1]:.3f}"
    return f"camvid, seed {run['seed']}, alpha {run['alpha']:g}, {run['method']}: {end}"


def alphas_of(runs: list[dict]) -> list[float]:
    """Those of the runs, rising."""
    return sorted({r["alpha"] for r in runs if "alpha" in r})


def cell(runs: list[dict], key: str) -> str:
    """Mean over seeds, and deviation where there are several; - for no number."""
    if any("diverged" in r for r in runs):
        return "diverged"
    values = [r[key] for r in runs if r.get(key) is not None]
    values = [value[-1] if key in FEATURES else value for value in values]
    _, unit, digits = TOLD[key]
    shown = [mean(values), pstdev(values)][: len(values)] if values else []
    return " +- ".join(f"{unit * number:.{digits}f}" for number in shown) or "-"


def table(runs: list[dict]) -> str:
    """Markdown: mIoU and softmax entropy by row and alpha, then the claims."""
    alphas = alphas_of(runs)
    at = lambda alpha: f"alpha {alpha:g}"
    heads = [f"{words}, {at(a)}" for words, *_ in TOLD.values() for a in alphas]
    central = cell([r for r in runs if r["method"] == CENTRAL], "generic")
    lines = [[CENTRAL, *[central] * len(alphas), *["-"] * len(alphas)]]
    for method in tables.methods_of(runs):
        own = [r for r in runs if r["method"] == method]
        of = {alpha: [r for r in own if r["alpha"] == alpha] for alpha in alphas}
        lines.append([method, *(cell(of[a], key) for key in TOLD for a in alphas)])
    found = tables.claims({at(alpha): as_classified(runs, alpha) for alpha in alphas})
    parts = tables.grid(["row", *heads], lines), found, tables.cost({NAME: runs})
    return "\n\n".join(filter(None, parts))


def as_classified(runs: list[dict], alpha: float) -> list[dict]:
    """The runs of an alpha and the central ones, with the keys of `tables`' runs.

    There are no stragglers: deviations are over seeds.
    """
    return [
        {
            **r,
            "stragglers": r["seed"],
            "accuracy": r.get("generic"),
            "loss": 0.0,
        }
        for r in runs
        if r["method"] == CENTRAL or r["alpha"] == alpha
    ]


def publish(runs: list[dict], target: pathlib.Path) -> None:
    """Add runs to this part of results.json; the table of all of them."""
    runs = tables.merged(target / "results.json", NAME, runs)[NAME]
    text = table(runs)
    write_between(target / "CAMVID.md", NAME, text)
    print(f"{NAME}\n\n{text}\n", flush=True)
