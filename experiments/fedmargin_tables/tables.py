"""Results of FedMargin's table in small: numbers, table and pictures."""

import json
import pathlib
from statistics import mean, pstdev

import numpy as np
from orderings import p_value, readable, verdict, write_between

SHARE = 0.8  # of the central accuracy, which a method has to reach
CENTRAL, OURS = "central", "fedmargin"
CAMVID = "camvid"  # whose results are of another kind, see `camvid_tables`
# Methods whose clients have other networks.
SEVERAL = ("local", "fedper", "fedrep", "fesem")
ORDER = "fedavg fairavg local fedper fedrep fesem fedatt fedatt_spectral feddane"
ORDER = [*ORDER.split(), "fedprox", "fedmargin"]  # its variants come last


def line(name: str, run: dict) -> str:
    """One run in a few words."""
    end = "diverged" if "diverged" in run else f"accuracy {run['curve'][-1]:.3f}"
    return (
        f"{name}, seed {run['seed']}, stragglers {run['stragglers']:g}, "
        f"{run['method']}: {end}"
    )


def rounds_to(curve: list[float], wanted: float) -> int | None:
    """The first round, from 1, whose accuracy is `wanted` or more; None for none.

    >>> rounds_to([0.1, 0.5, 0.4], 0.5), rounds_to([0.1], 0.5)
    (2, None)
    """
    return next((i for i, value in enumerate(curve, 1) if value >= wanted), None)


def timed(runs: list[dict]) -> list[dict]:
    """Runs with their first round of SHARE of the seed's central accuracy.

    A run that never gets there counts as the round after the last, the least that it
    can take: "taken" is [that number], "arrives" tells which it is.
    """
    central = {r["seed"]: r["accuracy"] for r in runs if r["method"] == CENTRAL}
    judged = [r.get("rounds", range(1, 1 + len(r.get("curve", [])))) for r in runs]
    never = 1 + max(rounds[-1] for rounds in judged if len(rounds))
    found = []
    for run, rounds in zip(runs, judged, strict=True):
        place = rounds_to(run.get("curve", []), SHARE * central[run["seed"]])
        taken = rounds[place - 1] if place else never
        found.append({**run, "taken": [taken], "arrives": place is not None})
    return found


def methods_of(runs: list[dict]) -> list[str]:
    """All but the central one, in the order of the table."""
    place = {method: i for i, method in enumerate(ORDER)}
    found = dict.fromkeys(r["method"] for r in runs if r["method"] != CENTRAL)
    return sorted(found, key=lambda method: place.get(method, len(place)))


def row_of(runs: list[dict], method: str) -> dict:
    """Figures of a method: mean over seeds, then mean and deviation over stragglers.

    Returns:
      {"accuracy", "loss": (mean, deviation), None where a run diverged; "of_seeds":
      deviation of the accuracy over seeds; "rounds": (mean, deviation) of those to
      SHARE of the central accuracy, see `timed`; "runs", "reached", "diverged": how
      many there are, get there and do}.
    """
    own = [r for r in timed(runs) if r["method"] == method]
    row = {"accuracy": None, "loss": None, "runs": len(own)}
    row["rounds"] = over_stragglers(own, [r["taken"][0] for r in own])
    row["reached"] = sum(r["arrives"] for r in own)
    row["diverged"] = sum("diverged" in r for r in own)
    if not row["diverged"]:
        ends = [r["curve"][-1] for r in own]
        row["accuracy"] = over_stragglers(own, ends)
        row["of_seeds"] = spread(own, ends, "seed")[1]
        row["loss"] = over_stragglers(own, [r["loss"] for r in own])
    return row


def rounds_cell(row: dict) -> str:
    """Rounds of a row; >= where some run never gets there, - where none does."""
    if not row["reached"]:
        return "-"
    least = ">= " if row["reached"] < row["runs"] else ""
    return f"{least}{row['rounds'][0]:.1f}"


def over_stragglers(runs: list[dict], values: list[float]) -> tuple[float, float]:
    """Mean over seeds at each share of stragglers, then their mean and deviation."""
    return spread(runs, values, "stragglers")


def spread(runs: list[dict], values: list[float], key: str) -> tuple[float, float]:
    """Mean and deviation over the values of `key`, of the means at each."""
    at = {}
    for run, value in zip(runs, values, strict=True):
        at.setdefault(run[key], []).append(value)
    means = [mean(part) for part in at.values()]
    return mean(means), pstdev(means)


def grid(heads: list[str], lines: list[list[str]]) -> str:
    """A table in Markdown."""
    rule = ["---"] * len(heads)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *lines))


def named(method: str) -> str:
    """A method, and how it is judged where it has no one network."""
    return f"{method}, own images" if method in SEVERAL else method


def table(sets: dict[str, list[dict]]) -> str:
    """Markdown: methods x sets, accuracy with its deviation over seeds, and rounds."""
    ends = {
        name: [r["accuracy"] for r in runs if r["method"] == CENTRAL]
        for name, runs in sets.items()
    }
    cells = [[f"{100 * mean(found):.1f}", "-"] for found in ends.values()]
    lines = [[CENTRAL, *sum(cells, [])]]
    for method in methods_of(sum(sets.values(), [])):
        cells = [method_cells(runs, method) for runs in sets.values()]
        lines.append([named(method), *sum(cells, [])])
    heads = [head for name in sets for head in (f"{name}, %", "rounds")]
    return grid(["method", *heads], lines)


def method_cells(runs: list[dict], method: str) -> list[str]:
    """[accuracy, rounds] of a method in a set."""
    if all(r["method"] != method for r in runs):
        return ["-", "-"]
    row = row_of(runs, method)
    if row["diverged"]:
        return [f"{row['diverged']} runs diverged", rounds_cell(row)]
    shown = 100 * row["accuracy"][0], 100 * row["of_seeds"]
    return ["{:.1f} +- {:.1f}".format(*shown), rounds_cell(row)]


def losses(sets: dict[str, list[dict]]) -> str:
    """Markdown: the training loss, with its deviation over shares of stragglers."""
    lines = []
    for method in methods_of(sum(sets.values(), [])):
        rows = [
            row_of(runs, method)["loss"]
            if any(r["method"] == method for r in runs)
            else None
            for runs in sets.values()
        ]
        cells = ["{:.2f} +- {:.2f}".format(*loss) if loss else "-" for loss in rows]
        lines.append([named(method), *cells])
    return grid(["training loss", *sets], lines)


def cost(sets: dict[str, list[dict]]) -> str:
    """Core seconds, of the runs that measured them, and when the runs are from."""
    runs = [r for part in sets.values() for r in part if r["method"] != CENTRAL]
    spent = [r["cost"]["core_seconds"] for r in runs if "cost" in r]
    days = sorted(r["made"].partition(",")[0] for r in runs if "made" in r)
    if not spent or not days:
        return ""
    each = sum(spent) / len(spent)
    whole = f"about {each * len(runs) / 60:.0f} core minutes"
    return f"{len(runs)} runs, {whole}, of {days[0]} to {days[-1]}."


def ends_of(runs: list[dict], method: str, seed: int, key: str) -> float:
    """Last value of a curve, mean over stragglers; nan where there is none."""
    found = [
        r[key][-1]
        for r in runs
        if r["method"] == method and r["seed"] == seed and key in r
    ]
    return mean(found) if found else float("nan")


def claims(parts: dict[str, list[dict]]) -> str:
    """Markdown: what the article says of FedMargin, by paired t-tests over seeds.

    Args:
      parts: {head of a column: the runs that it is asked of}.
    """
    found = {head: claims_of(runs) for head, runs in parts.items()}
    found = {head: cells for head, cells in found.items() if cells}
    texts = dict.fromkeys(text for cells in found.values() for text in cells)
    lines = [[text, *(c.get(text, "-") for c in found.values())] for text in texts]
    return grid(["the article", *found], lines) if found else ""


def claims_of(runs: list[dict]) -> dict[str, str]:
    """{claim: the mean gain beside which method, p, whether it holds}.

    Others are the methods with one network; "best" is beside the best of them on
    average. A gain is positive where the claim is right, and of the seeds of both.
    """
    rows = {method: row_of(runs, method) for method in methods_of(runs)}
    rivals = [m for m in rows if m not in SEVERAL and not m.startswith(OURS)]
    ends = {m: rows[m]["accuracy"][0] for m in rivals if rows[m]["accuracy"]}
    if OURS not in rows or not ends or not rows[OURS]["accuracy"]:
        return {}
    second = max(ends, key=ends.get)
    fastest = min(rivals, key=lambda method: rows[method]["rounds"])
    told = [
        ("best accuracy, points", second, "curve", 100),
        ("above FedAvg, points", "fedavg", "curve", 100),
        ("above the plain mean, FairAvg, points", "fairavg", "curve", 100),
        ("above FedAtt, points", "fedatt", "curve", 100),
        ("above FedProx, points", "fedprox", "curve", 100),
        ("above raw margins, points", f"{OURS}_hypothesis", "curve", 100),
        ("above margins at unit length", f"{OURS}_hypothesis_unit", "curve", 100),
        ("fewer rounds to 80 %", fastest, "taken", -1),
        ("features nearer to central ones, MMD^2", "fedavg", "mmd", -1),
        ("wider margins, AMM", "fedavg", "amm", 1),
        ("less uncertainty, softmax entropy", "fedavg", "softmax_entropy", -1),
    ]
    cells, seeds, runs = {}, sorted({r["seed"] for r in runs}), timed(runs)
    for text, other, key, unit in told:
        ours = np.array([ends_of(runs, OURS, seed, key) for seed in seeds])
        theirs = np.array([ends_of(runs, other, seed, key) for seed in seeds])
        gain = unit * (ours - theirs)
        gain = gain[np.isfinite(gain)]
        if other in rows and len(gain):
            cells[text] = claim_cell(gain, other)
    return cells


def claim_cell(gain: np.ndarray, other: str) -> str:
    """Mean of the gains [seeds] beside `other`, p, and whether the claim holds."""
    shown = f"{gain.mean() + 0.0:+.3g} beside {other}"  # no -0
    if len(gain) == 1:
        return f"{shown}, one seed"
    return f"{shown}, p {p_value(gain):.3f}: {verdict(gain)}"


def merged(path: pathlib.Path, name: str, runs: list[dict]) -> dict[str, list[dict]]:
    """Put runs into a set's part of results.json: those of before stay.

    Returns:
      All runs of all sets, those of a set in the order of the table.
    """
    results = json.loads(path.read_text()) if path.exists() else {}
    of = {place_of(run): run for run in [*results.get(name, []), *runs]}
    results = {**results, name: [of[place] for place in sorted(of)]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(readable(results))
    return results


def place_of(run: dict) -> tuple:
    """What tells a run from others of its set: the central one of a seed is first."""
    method = run["method"]
    order = [CENTRAL, *ORDER]
    rank = order.index(method) if method in order else len(order)
    settings = run.get("stragglers", -1.0), run.get("alpha", -1.0)
    return run["seed"], *settings, rank, method


def texts_of(results: dict[str, list[dict]]) -> dict[str, str]:
    """{part of README.md: its Markdown} of the sets but CamVid."""
    sets = {name: runs for name, runs in results.items() if name != CAMVID}
    return {
        "table": table(sets),
        "claims": f"{claims(sets)}\n\n{cost(sets)}".strip(),
        "losses": losses(sets),
    }


def publish(name: str, runs: list[dict], target: pathlib.Path) -> None:
    """Add runs to a set's part of results.json; tables of all, pictures of the set."""
    results = merged(target / "results.json", name, runs)
    for part, text in texts_of(results).items():
        write_between(target / "README.md", part, text)
        print(f"{text}\n", flush=True)
