"""CamVid's part of FedMargin's tables: numbers, curves and test images."""

import pathlib
from statistics import mean, pstdev

import tables

CENTRAL, NAME, LOSS = "central", "camvid", "loss"
FEATURES = {  # curves, of the one network
    "amm": "AMM",
    "mmd": "MMD^2 to central",
    "softmax_entropy": "softmax entropy, nats",
}
JUDGED = {"generic": "one network", "personalised": "own images"}  # mIoU
KEPT_LATER = {  # of which a row may have none
    LOSS: "training loss",
    "attention_entropy": "attention's entropy, nats",
    **FEATURES,
}


def line(run: dict) -> str:
    """One run in a few words."""
    end = "diverged" if "diverged" in run else f"mIoU {run['curve'][-1]:.3f}"
    return f"camvid, seed {run['seed']}, alpha {run['alpha']:g}, {run['method']}: {end}"


def alphas_of(runs: list[dict]) -> list[float]:
    """Those of the runs, rising."""
    return sorted({r["alpha"] for r in runs if "alpha" in r})


def told(values: list[float], key: str) -> str:
    """Mean, and deviation of several; of overlap in percent."""
    unit, digits = (100, 1) if key in JUDGED else (1, 3)
    shown = [mean(values), pstdev(values)][: len(values)]
    return " +- ".join(f"{unit * number:.{digits}f}" for number in shown)


def cell(runs: list[dict], key: str) -> str:
    """Mean over seeds, and deviation where there are several; - for no number."""
    if any("diverged" in r for r in runs):
        return "diverged"
    values = [r[key] for r in runs if r.get(key) is not None]
    values = [value[-1] if key in FEATURES else value for value in values]
    return told(values, key) if values else "-"


def plain(runs: list[dict]) -> list[dict]:
    """Those in which nobody straggles."""
    return [r for r in runs if not r.get("stragglers")]


def table(runs: list[dict]) -> str:
    """mIoU in % by row and alpha as Markdown, the central one above it.

    Below it the shares of stragglers, where some were played.
    """
    spent = tables.cost(runs)
    shares, runs = of_shares(runs), plain(runs)
    central = [r for r in runs if r["method"] == CENTRAL]
    alphas = alphas_of(runs)
    heads = [f"alpha {alpha:g}" for alpha in alphas]
    head = f"Central mIoU {cell(central, 'generic')} % ({len(central)} seeds)."
    lines = [
        f"{head} {spent}".rstrip(),
        "",
        "| row | judged | " + " | ".join(heads) + " |",
        "| --- | --- |" + " --- |" * len(alphas),
    ]
    methods = tables.methods_of(runs)
    for key, words in {**JUDGED, **KEPT_LATER}.items():
        for method in methods:
            own = [r for r in runs if r["method"] == method]
            if key in KEPT_LATER and not any(r.get(key) is not None for r in own):
                continue
            cells = [cell([r for r in own if r["alpha"] == a], key) for a in alphas]
            lines.append(f"| {method} | {words} | " + " | ".join(cells) + " |")
    parts = {f"alpha {alpha:g}": as_classified(runs, alpha) for alpha in alphas}
    for method in methods:
        cells = [
            tables.rounds_cell(tables.row_of(part, method))
            if any(r["method"] == method for r in part)
            else "-"
            for part in parts.values()
        ]
        words = "own images" if method in tables.SEVERAL else "one network"
        lines.append(f"| {method} | rounds, {words} | " + " | ".join(cells) + " |")
    asked = {f"{name}: ": part for name, part in parts.items()}
    return "\n".join([*lines, "", tables.claims(asked), "", *shares]).rstrip()


def of_shares(runs: list[dict]) -> list[str]:
    """By row and share of stragglers, of the alphas where some straggle.

    mIoU in %, then the loss of the last round's local steps, then rounds to 0.8 of the
    central mIoU; of the seeds that were played at every share.
    """
    lines = []
    central = [r for r in runs if r["method"] == CENTRAL]
    for alpha in sorted({r["alpha"] for r in runs if r.get("stragglers")}):
        here = [{"stragglers": 0.0, **r} for r in runs if r.get("alpha") == alpha]
        shares = sorted({r["stragglers"] for r in here})
        seeds = [{r["seed"] for r in here if r["stragglers"] == s} for s in shares]
        seeds = set.intersection(*seeds)
        here = [r for r in here if r["seed"] in seeds]
        heads = [f"{100 * share:g} % straggle" for share in shares]
        about = f"alpha {alpha:g}, seeds {', '.join(map(str, sorted(seeds)))}"
        heads = [about, *heads, "over the shares"]
        lines += ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
        for method in tables.methods_of(here):
            own = [r for r in here if r["method"] == method]
            judged = "personalised" if method in tables.SEVERAL else "generic"
            for key, name in ((judged, method), (LOSS, f"{method}, loss")):
                if cells := cells_of_shares(own, shares, key):
                    lines.append("| " + " | ".join([name, *cells]) + " |")
            if {r["stragglers"] for r in own} == set(shares):
                cells = rounds_of_shares(own, central, shares)
                lines.append("| " + " | ".join([f"{method}, rounds", *cells]) + " |")
        lines.append("")
    return lines


def cells_of_shares(own: list[dict], shares: list[float], key: str) -> list[str]:
    """A row at each share, over seeds, and its mean and deviation over the shares.

    Nothing where a share has no number.
    """
    at = [[r for r in own if r["stragglers"] == share] for share in shares]
    if any("diverged" in r for r in own):
        return [*(cell(runs, key) for runs in at), "-"] if all(at) else []
    if not all(runs and all(key in r for r in runs) for runs in at):
        return []
    means = [mean(r[key] for r in runs) for runs in at]
    return [*(cell(runs, key) for runs in at), told(means, key)]


def rounds_of_shares(
    own: list[dict], central: list[dict], shares: list[float]
) -> list[str]:
    """A row's rounds at each share, over seeds, and over the shares; all its runs."""
    method = own[0]["method"]
    told = [{**r, "loss": 0.0} for r in own]
    ends = [{**r, "accuracy": r["generic"]} for r in central]
    at = [
        [{**r, "stragglers": r["seed"]} for r in told if r["stragglers"] == share]
        for share in shares
    ]
    rows = [tables.row_of([*ends, *runs], method) for runs in (*at, told)]
    return [tables.rounds_cell(row) for row in rows]


def as_classified(runs: list[dict], alpha: float) -> list[dict]:
    """The runs of an alpha and the central ones, with the keys of `tables`' runs.

    There are no stragglers: deviations are over seeds.
    """
    return [
        {**r, "stragglers": r["seed"], "accuracy": r.get("generic"), "loss": 0.0}
        for r in runs
        if r["method"] == CENTRAL or r["alpha"] == alpha
    ]


def publish(runs: list[dict], target: pathlib.Path) -> None:
    """Add runs to this part of results.json; table and curves of all of them."""
    runs = tables.merged(target / "results.json", NAME, runs)
    text = table(runs)
    tables.write_between(target / "README.md", NAME, text)
    draw_curves(runs, target / f"{NAME}.png")
    print(f"{NAME}\n\n{text}\n", flush=True)


def draw_curves(runs: list[dict], path: pathlib.Path) -> None:
    """Figures 7, 5 and 6: mIoU, AMM and MMD by round at every alpha, mean over seeds.

    Without stragglers; the central mIoU as a line.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    runs = plain(runs)
    alphas, methods = alphas_of(runs), tables.methods_of(runs)
    kept = {key: name for key, name in FEATURES.items() if any(key in r for r in runs)}
    panels = {"curve": "mIoU of test images", **kept}
    size = (3 * len(alphas) + 2, 3 * len(panels) + 0.6)
    figure, axes = pyplot.subplots(
        len(panels), len(alphas), figsize=size, sharey="row", squeeze=False
    )
    colours = dict(zip(methods, pyplot.get_cmap("tab20").colors, strict=False))
    central = mean(r["generic"] for r in runs if r["method"] == CENTRAL)
    for row, (key, words) in zip(axes, panels.items(), strict=True):
        row[0].set_ylabel(words)
        for axis, alpha in zip(row, alphas, strict=True):
            here = [r for r in runs if r.get("alpha") == alpha and key in r]
            draw_panel(axis, here, key, colours)
            if key == "curve":
                axis.axhline(central, color="black", linewidth=0.8, label=CENTRAL)
                axis.set_title(f"alpha = {alpha:g}")
    for axis in axes[-1]:
        axis.set_xlabel("round")
    lines, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, fontsize=7, loc="center right")
    figure.tight_layout(rect=(0, 0, 0.87, 1))
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def draw_panel(axis, runs: list[dict], key: str, colours: dict) -> None:
    """A curve of every row, mean over its runs."""
    for method in tables.methods_of(runs):
        own = [r for r in runs if r["method"] == method]
        is_one = own[0]["generic"] is not None
        label = method if is_one else f"{method}, own images"
        curve = [mean(x) for x in zip(*(r[key] for r in own), strict=True)]
        style = {"linestyle": "-" if is_one else "--", "color": colours[method]}
        axis.plot(own[0]["rounds"], curve, marker=".", label=label, **style)


def draw_images(grids: dict, target: pathlib.Path) -> None:
    """Figure 8: {alpha: {row: grid}}, a picture per alpha, all in the same colours."""
    from fedfr_jax.runs.report.grids import limits_of, plot_grid

    both = {alpha: beside(of) for alpha, of in grids.items()}
    limits = limits_of(both.values())
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
    given = {name: first.pictures[name] for name in ("input", "truth")}
    predicted = {
        f"{row}: prediction": g.pictures["prediction"] for row, g in grids.items()
    }
    maps = {
        f"{row}: {name}": grid.maps[name]
        for name in first.maps
        for row, grid in grids.items()
    }
    return first._replace(pictures={**given, **predicted}, maps=maps)
