"""Results of FedMargin's table in small: numbers, table and pictures."""

import json
import pathlib
from statistics import mean, pstdev

SHARE = 0.8  # of the central accuracy, which a method has to reach
CENTRAL = "central"
ORDER = "fedavg fairavg fedper fedrep fesem fedatt fedatt_spectral feddane fedprox"
ORDER = [*ORDER.split(), "fedmargin", "fedmargin_counts"]  # others come last


def line(name: str, run: dict) -> str:
    """One run in a few words."""
    return (
        f"{name}, seed {run['seed']}, stragglers {run['stragglers']:g}, "
        f"{run['method']}: accuracy {run['curve'][-1]:.3f}"
    )


def rounds_to(curve: list[float], wanted: float) -> int | None:
    """The first round, from 1, whose accuracy is `wanted` or more; None for none.

    >>> rounds_to([0.1, 0.5, 0.4], 0.5), rounds_to([0.1], 0.5)
    (2, None)
    """
    return next((i for i, value in enumerate(curve, 1) if value >= wanted), None)


def rows_of(runs: list[dict]) -> dict[str, dict]:
    """{method: figures}, mean over seeds, then mean and deviation over stragglers.

    Figures are {"accuracy", "loss": (mean, deviation)}, "rounds": those to SHARE of the
    seed's central accuracy, their mean over runs, and "reached": of how many runs;
    "rounds" is None unless all have reached it.
    """
    central = {r["seed"]: r["accuracy"] for r in runs if r["method"] == CENTRAL}
    others = [r for r in runs if r["method"] != CENTRAL]
    rows = {}
    place = {method: i for i, method in enumerate(ORDER)}
    methods = dict.fromkeys(r["method"] for r in others)
    for method in sorted(methods, key=lambda m: place.get(m, len(place))):
        own = [r for r in others if r["method"] == method]
        ratios = sorted({r["stragglers"] for r in own})
        at = [[r for r in own if r["stragglers"] == ratio] for ratio in ratios]
        taken = [rounds_to(r["curve"], SHARE * central[r["seed"]]) for r in own]
        values = {
            "accuracy": [mean(r["curve"][-1] for r in part) for part in at],
            "loss": [mean(r["loss"] for r in part) for part in at],
        }
        rows[method] = {name: (mean(x), pstdev(x)) for name, x in values.items()}
        is_reached = [x is not None for x in taken]
        rows[method]["rounds"] = mean(taken) if all(is_reached) else None
        rows[method]["reached"] = f"{sum(is_reached)}/{len(taken)}"
    return rows


def table(runs: list[dict]) -> str:
    """The table as Markdown, the central accuracy above it."""
    central = [r["accuracy"] for r in runs if r["method"] == CENTRAL]
    lines = [
        f"Central accuracy {mean(central):.3f} ({len(central)} seeds).",
        "",
        "| method | accuracy, % | training loss | rounds to 80 % | runs so far |",
        "| --- | --- | --- | --- | --- |",
    ]
    for method, row in rows_of(runs).items():
        accuracy, spread = (100 * x for x in row["accuracy"])
        loss, of_loss = row["loss"]
        rounds = "-" if row["rounds"] is None else f"{row['rounds']:.1f}"
        lines.append(
            f"| {method} | {accuracy:.1f} +- {spread:.1f} | {loss:.3f} +- "
            f"{of_loss:.3f} | {rounds} | {row['reached']} |"
        )
    return "\n".join(lines)


def publish(name: str, runs: list[dict], target: pathlib.Path) -> None:
    """Write a set's part of results.json and README.md, and its picture."""
    path = target / "results.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    target.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**kept, name: runs}, indent=1) + "\n")
    text = table(runs)
    write_between(target / "README.md", name, text)
    draw(name, runs, target / f"{name}.png")
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
    figure, axes = pyplot.subplots(1, len(panels), figsize=(13, 3.6))
    for axis, (key, label) in zip(axes, panels.items(), strict=True):
        for method in dict.fromkeys(r["method"] for r in plain):
            curves = [r[key] for r in plain if r["method"] == method and key in r]
            if curves:
                values = [mean(x) for x in zip(*curves, strict=True)]
                axis.plot(range(1, len(values) + 1), values, label=method)
        axis.set(xlabel="round", ylabel=label)
    axes[0].legend(fontsize=7)
    figure.suptitle(f"{name}, no stragglers")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
