"""Results of FedMargin's table in small: numbers, table and pictures."""

import json
import pathlib
from statistics import mean, pstdev

import numpy as np
from orderings import p_value, readable, verdict

SHARE = 0.8  # of the central accuracy, which a method has to reach
CENTRAL, OURS = "central", "fedmargin"
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
      SHARE of the seed's central accuracy, None unless all runs get there or where
      clients are judged by networks of their own; "reached": by how many runs;
      "diverged": how many did}.
    """
    central = {r["seed"]: r["accuracy"] for r in runs if r["method"] == CENTRAL}
    own = [r for r in runs if r["method"] == method]
    ends = [r for r in own if "diverged" not in r]
    row = {"accuracy": None, "loss": None, "diverged": len(own) - len(ends)}
    taken = [rounds_to(r["curve"], SHARE * central[r["seed"]]) for r in ends]
    reached = len(taken) - taken.count(None)
    is_told = method not in SEVERAL
    row["reached"] = f"{reached}/{len(own)}" if is_told else "-"
    row["rounds"] = None
    if is_told and reached == len(own):
        row["rounds"] = over_stragglers(own, taken)
    if not row["diverged"]:
        ends = [r["curve"][-1] for r in own]
        row["accuracy"] = over_stragglers(own, ends)
        row["of_seeds"] = spread(own, ends, "seed")[1]
        row["loss"] = over_stragglers(own, [r["loss"] for r in own])
    return row


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


def table(runs: list[dict]) -> str:
    """The table as Markdown, the central accuracy above it and claims below."""
    central = [r["accuracy"] for r in runs if r["method"] == CENTRAL]
    lines = [
        f"Central accuracy {mean(central):.3f} ({len(central)} seeds). {cost(runs)}",
        "",
        "| method | accuracy, % | over seeds | training loss | rounds to 80 % "
        "| runs so far |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for method in methods_of(runs):
        row = row_of(runs, method)
        rounds = "{:.1f} +- {:.1f}".format(*row["rounds"]) if row["rounds"] else "-"
        if row["diverged"]:
            accuracy, seeds, loss = f"{row['diverged']} runs diverged", "-", "-"
        else:
            accuracy = "{:.1f} +- {:.1f}".format(*(100 * x for x in row["accuracy"]))
            seeds = f"+- {100 * row['of_seeds']:.1f}"
            loss = "{:.3f} +- {:.3f}".format(*row["loss"])
        lines.append(
            f"| {method} | {accuracy} | {seeds} | {loss} | {rounds} "
            f"| {row['reached']} |"
        )
    return "\n".join([*lines, "", claims(runs)])


def cost(runs: list[dict]) -> str:
    """Core seconds, of the runs that measured them, and where all runs come from."""
    spent = [r["cost"]["core_seconds"] for r in runs if "cost" in r]
    if not spent:
        return ""
    told = [r["made"] for r in runs if "made" in r]
    stamps = "; ".join(f"{told.count(x)} at {x}" for x in sorted(set(told)))
    each, count = sum(spent) / len(spent), sum(r["method"] != CENTRAL for r in runs)
    whole = f"about {each * count / 60:.0f} core minutes"
    return f"{count} runs of {each:.0f} core s, {whole}; {stamps}."


def ends_of(runs: list[dict], method: str, seed: int, key: str) -> float:
    """Last value of a curve, mean over stragglers; nan where there is none."""
    found = [
        r[key][-1]
        for r in runs
        if r["method"] == method and r["seed"] == seed and key in r
    ]
    return mean(found) if found else float("nan")


def claims(runs: list[dict]) -> str:
    """Markdown: what the article says of FedMargin, by paired t-tests over seeds.

    Others are the methods with one network; "second" is the best of them on average.
    """
    rows = {method: row_of(runs, method) for method in methods_of(runs)}
    others = {
        method: row["accuracy"][0]
        for method, row in rows.items()
        if row["accuracy"] and method not in SEVERAL and not method.startswith(OURS)
    }
    seeds = sorted({r["seed"] for r in runs})
    if OURS not in rows or not others or not rows[OURS]["accuracy"]:
        return ""
    second = max(others, key=others.get)
    lines = [
        "| the article | rows | difference, each seed | p | holds |",
        "| --- | --- | --- | --- | --- |",
    ]
    told = [
        ("best accuracy, points", second, "curve", 100),
        ("above FedAvg, points", "fedavg", "curve", 100),
        ("features nearer to central ones, MMD^2", "fedavg", "mmd", -1),
        ("wider margins, AMM", "fedavg", "amm", 1),
    ]
    for text, other, key, unit in told:
        ours = np.array([ends_of(runs, OURS, seed, key) for seed in seeds])
        theirs = np.array([ends_of(runs, other, seed, key) for seed in seeds])
        gain = unit * (ours - theirs)
        if other not in rows or not np.isfinite(gain).all():
            continue
        shown = ", ".join(f"{x:+.3g}" for x in gain)
        sign = f"{OURS} - {other}" if unit > 0 else f"{other} - {OURS}"
        found = f"{p_value(gain):.3f} | {verdict(gain)}"
        lines.append(f"| {text} | {sign} | {shown} | {found} |")
    return "\n".join([*lines, "", faster(rows)])


def faster(rows: dict[str, dict]) -> str:
    """How many rounds fewer FedMargin takes to 80 % than the next one."""
    taken = {m: r["rounds"][0] for m, r in rows.items() if r["rounds"]}
    others = {m: x for m, x in taken.items() if not m.startswith(OURS)}
    if OURS not in taken or not others:
        return "Rounds to 80 %: FedMargin or all others do not get there in every run."
    best = min(others, key=others.get)
    share = 100 * (1 - taken[OURS] / others[best])
    return f"Rounds to 80 %: {share:.0f} % fewer than {best} (the article: 17 to 18 %)."


def merged(path: pathlib.Path, name: str, runs: list[dict]) -> list[dict]:
    """Put runs into a set's part of results.json: those of before stay.

    Returns:
      All runs of the set, in the order of the table.
    """
    results = json.loads(path.read_text()) if path.exists() else {}
    of = {place_of(run): run for run in [*results.get(name, []), *runs]}
    found = [of[place] for place in sorted(of)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(readable({**results, name: found}))
    return found


def place_of(run: dict) -> tuple:
    """What tells a run from others of its set: the central one of a seed is first."""
    method = run["method"]
    order = [CENTRAL, *ORDER]
    rank = order.index(method) if method in order else len(order)
    settings = run.get("stragglers", -1.0), run.get("alpha", -1.0)
    return run["seed"], *settings, rank, method


def publish(name: str, runs: list[dict], target: pathlib.Path) -> None:
    """Add runs to a set's part of results.json; table and pictures of all of them."""
    runs = merged(target / "results.json", name, runs)
    text = table(runs)
    write_between(target / "README.md", name, text)
    draw(name, runs, target / f"{name}.png")
    draw_gaps(name, runs, target / f"{name}_gaps.png")
    print(f"{name}\n\n{text}\n", flush=True)


def write_between(path: pathlib.Path, name: str, text: str) -> None:
    """Put text between the marks of a set, at the end where there are none."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    old = path.read_text() if path.exists() else ""
    before, found, rest = old.partition(begin)
    after = rest.partition(end)[2] if found else ""
    before = before if found else f"{old.rstrip()}\n\n## {name}\n\n"
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after or chr(10)}")


def draw(name: str, runs: list[dict], path: pathlib.Path) -> None:
    """Accuracy, AMM and MMD by round without stragglers, mean over seeds."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = {"curve": "test accuracy", "amm": "AMM", "mmd": "MMD^2 to central"}
    least = min((r["stragglers"] for r in runs if "stragglers" in r), default=0)
    plain = [r for r in runs if r.get("stragglers") == least]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(14, 3.6))
    colours = pyplot.get_cmap("tab20").colors
    for colour, method in zip(colours, methods_of(plain), strict=False):
        for axis, (key, label) in zip(axes, panels.items(), strict=True):
            axis.set(xlabel="round", ylabel=label)
            curves = [r[key] for r in plain if r["method"] == method and key in r]
            is_own = method in SEVERAL
            if curves and not (is_own and key != "curve"):
                values = [mean(x) for x in zip(*curves, strict=True)]
                rounds = range(1, len(values) + 1)
                label = f"{method}, own images" if is_own else method
                style = {"linestyle": "--" if is_own else "-", "color": colour}
                axis.plot(rounds, values, label=label, **style)
    lines, names = axes[0].get_legend_handles_labels()
    figure.legend(lines, names, fontsize=7, loc="center right")
    figure.suptitle(f"{name}, no stragglers")
    figure.tight_layout(rect=(0, 0, 0.89, 1))
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def draw_gaps(name: str, runs: list[dict], path: pathlib.Path) -> None:
    """Figure 4: accuracy and rounds beside FedMargin's, of methods with one network."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    told = [method for method in methods_of(runs) if method not in SEVERAL]
    rows = {method: row_of(runs, method) for method in told}
    if not rows.get(OURS, {}).get("accuracy"):
        return
    ours = rows.pop(OURS)
    accuracies = {m: r["accuracy"] for m, r in rows.items() if r["accuracy"]}
    gaps = {m: 100 * (x[0] - ours["accuracy"][0]) for m, x in accuracies.items()}
    panels = {"accuracy, points above FedMargin": gaps}
    if ours["rounds"]:
        taken = {m: r["rounds"][0] for m, r in rows.items() if r["rounds"]}
        slower = {m: 100 * (x / ours["rounds"][0] - 1) for m, x in taken.items()}
        panels["rounds to 80 %, % more than FedMargin"] = slower
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(5.5 * len(panels), 3.6), squeeze=False
    )
    for axis, (label, values) in zip(axes[0], panels.items(), strict=True):
        axis.barh(list(values), list(values.values()))
        axis.invert_yaxis()
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set(xlabel=label)
    figure.suptitle(f"{name}: mean over seeds and stragglers")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
