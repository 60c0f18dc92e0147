"""The plots: rank-1 by round, every client's networks, statistics of batch norms."""

import pathlib

import numpy as np
from matplotlib.ticker import MaxNLocator
from reid_cases import CAMERA, IDENTITY, PARTS, PRETRAINED
from reid_measures import Results, last, runs_of, swing, values_of

from fedfr_jax.runs.report import figures

SCENARIOS = (CAMERA, IDENTITY, PARTS)
COLORS = {"without": "#0072B2", "kd": "#D55E00", "cdw": "#009E73", "both": "#CC79A7"}
SHOWN = {  # row: (label, color)
    "fedpav": ("FedPav", COLORS["without"]),
    "kd": ("KD", COLORS["kd"]),
    "cdw": ("CDW", COLORS["cdw"]),
    "kd_cdw": ("KD + CDW", COLORS["both"]),
}
STATISTICS = {"first": "first client's", "average": "average", "local": "own"}
BARS = {  # label: (row, whose networks)
    "global": ("fedpav", "personalized"),
    "local": ("fedpav", "local"),
    "standalone": ("standalone", "local"),
}


def draw(results: Results, folder: pathlib.Path) -> None:
    """Every plot that there are rows for."""
    played = [case for case in SCENARIOS if runs_of(results, case, "fedpav")]
    pretrained = [PRETRAINED] if runs_of(results, PRETRAINED, "fedpav") else []
    if played:
        _curves(results, [*played, *pretrained], folder / "rounds.png")
        _clients(results, played, folder / "clients.png")
    if runs_of(results, PARTS, "fedpav_first"):
        _statistics(results, folder / "statistics.png")


def _finish(figure, path):
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=110)


def _curve(axes, results, case, row, **style):
    """The first seed with the band of all extremes: a mean would hide swings."""
    seeds = [run["of_round"] for run in runs_of(results, case, row)]
    if not seeds or not min(map(len, seeds)):
        return
    curves = np.array([curve[: min(map(len, seeds))] for curve in seeds])
    rounds = np.arange(1, curves.shape[1] + 1)
    (line,) = axes.plot(rounds, curves[0], marker=".", ms=3, **style)
    low, high = curves.min(axis=0), curves.max(axis=0)
    axes.fill_between(rounds, low, high, color=line.get_color(), alpha=0.12, lw=0)
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _curves(results, played, path):
    """The one network after every round, with and without KD and CDW."""
    figure, grid = figures.panels(len(played), 4.6, 3.6)
    for axes, case in zip(grid, played, strict=True):
        for row, (label, color) in SHOWN.items():
            _curve(axes, results, case, row, color=color, label=label)
        center = values_of(results, case, "merged", last)
        if len(center):
            style = {"color": "black", "linestyle": "--", "lw": 1, "label": "merged"}
            axes.axhline(center.mean(), **style)
        axes.set_title(case.replace("_", " "), fontsize=10)
        axes.set_ylabel("rank-1 of the global model")
    _finish(figure, path)


def _clients(results, played, path):
    """Global, local and standalone networks on each client's test."""
    figure, grid = figures.panels(len(played), 4.6, 3.8)
    for axes, case in zip(grid, played, strict=True):
        clients = runs_of(results, case, "fedpav")[0]["clients"]
        order = np.argsort(clients["images"], kind="stable")[::-1]
        names = [f"{clients['names'][i]}\n{clients['images'][i]}" for i in order]
        for place, (label, (row, whose)) in enumerate(BARS.items()):
            runs = runs_of(results, case, row)
            if not runs:
                continue
            values = np.array([run["of_client"][whose] for run in runs])[:, order]
            error = values.std(axis=0, ddof=1) if len(values) > 1 else None
            at = np.arange(len(order)) + 0.27 * (place - 1)
            color = [*COLORS.values()][place]
            style = {"color": color, "label": label, "ecolor": "0.3", "capsize": 2}
            axes.bar(at, values.mean(axis=0), 0.25, yerr=error, **style)
        axes.set_xticks(range(len(names)), names, fontsize=7)
        axes.set_title(case.replace("_", " "), fontsize=10)
        axes.set_xlabel("client, and its images")
        axes.set_ylabel("rank-1")
        axes.set_ylim(top=1.15 * axes.get_ylim()[1])  # room for the legend
    _finish(figure, path)


def _statistics(results, path):
    """FedPav and KD with three kinds of running statistics, and how far they swing."""
    figure, grid = figures.panels(3, 4.6, 3.6)
    colors = dict(zip(STATISTICS, COLORS.values(), strict=False))
    names = lambda row: {how: f"{row}_{how}" for how in STATISTICS} | {"average": row}
    for axes, row in zip(grid[:2], ("fedpav", "kd"), strict=True):
        for how, name in names(row).items():
            style = {"color": colors[how], "label": STATISTICS[how]}
            _curve(axes, results, PARTS, name, **style)
        axes.set_title(f"{SHOWN[row][0]}, by statistics", fontsize=10)
        axes.set_ylabel("rank-1")
    ends = [axes.get_ylim() for axes in grid[:2]]
    for axes in grid[:2]:
        axes.set_ylim(min(ends)[0], max(top for _, top in ends))
    for place, how in enumerate(STATISTICS):
        for row, at in (("fedpav", 0), ("kd", 1)):
            values = values_of(results, PARTS, names(row)[how], swing)
            if len(values):
                x = at + 0.27 * (place - 1)
                label = STATISTICS[how] if not at else None
                grid[2].bar(x, values.mean(), 0.25, color=colors[how], label=label)
                grid[2].plot([x] * len(values), values, "k.", ms=4)
    grid[2].set_xticks([0, 1], ["FedPav", "KD"])
    grid[2].set_title("swing in the second half of the rounds", fontsize=10)
    grid[2].set_ylabel("deviation from a line")
    _finish(figure, path)
