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
    """Add runs to this part of results.json; table and curves of all of them."""
    runs = tables.merged(target / "results.json", NAME, runs)[NAME]
    text = table(runs)
    write_between(target / "README.md", NAME, text)
    draw_curves(runs, target / f"{NAME}.png")
    print(f"{NAME}\n\n{text}\n", flush=True)


def draw_curves(runs: list[dict], path: pathlib.Path) -> None:
    """Figures 7, 5 and 6: mIoU and features by round at every alpha, mean over seeds.

    The central mIoU as a line.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    alphas, methods = alphas_of(runs), tables.methods_of(runs)
    kept = {key: name for key, name in FEATURES.items() if any(key in r for r in runs)}
    panels = {"curve": "mIoU of test images", **kept}
    figure, axes = pyplot.subplots(
        *(len(panels), len(alphas)),
        figsize=(3 * len(alphas) + 2, 3 * len(panels) + 0.6),
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    colors = dict(zip(methods, pyplot.get_cmap("tab20").colors, strict=False))
    central = mean(r["generic"] for r in runs if r["method"] == CENTRAL)
    for row, (key, words) in zip(axes, panels.items(), strict=True):
        row[0].set_ylabel(words)
        for axis, alpha in zip(row, alphas, strict=True):
            here = [r for r in runs if r.get("alpha") == alpha and key in r]
            draw_panel(axis, here, key, colors)
            if key == "curve":
                axis.axhline(central, color="black", linewidth=0.8, label=CENTRAL)
                axis.set_title(f"alpha = {alpha:g}")
    for axis in axes[-1]:
        axis.set_xlabel("round")
    lines, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, fontsize=7, loc="outside right upper")
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def draw_panel(axis, runs: list[dict], key: str, colors: dict) -> None:
    """A curve of every row, mean over its runs."""
    for method in tables.methods_of(runs):
        own = [r for r in runs if r["method"] == method]
        is_one = own[0]["generic"] is not None
        label = method if is_one else f"{method}, own images"
        curve = [mean(x) for x in zip(*(r[key] for r in own), strict=True)]
        style = {"linestyle": "-" if is_one else "--", "color": colors[method]}
        axis.plot(own[0]["rounds"], curve, marker=".", label=label, **style)


def draw_images(grids: dict, target: pathlib.Path) -> None:
    """Figure 8: {alpha: {row: grid}}, a picture per alpha, all in the same colors."""
    from fedfr_jax.runs.report.grids import color_limits, plot_grid

    both = {alpha: beside(of) for alpha, of in grids.items()}
    limits = color_limits(both.values())
    for kind in {name.partition(": ")[2] for name in limits}:
        same = [ends for name, ends in limits.items() if name.endswith(f": {kind}")]
        ends = min(low for low, _ in same), max(high for _, high in same)
        limits |= {name: ends for name in limits if name.endswith(f": {kind}")}
    for alpha, grid in both.items():
        title = f"CamVid, Dirichlet alpha = {alpha:g}"
        path = target / f"{NAME}_alpha{alpha:g}.png"
        plot_grid(path, grid, title=title, limits=limits)


def beside(grids: dict):
    """One grid of several rows' of the same images: {row: grid}."""
    first = next(iter(grids.values()))
    given = {name: first.images[name] for name in ("input", "truth")}
    predicted = {
        f"{row}: prediction": g.images["prediction"] for row, g in grids.items()
    }
    maps = {
        f"{row}: {name}": grid.maps[name]
        for name in first.maps
        for row, grid in grids.items()
    }
    return first._replace(images={**given, **predicted}, maps=maps)
