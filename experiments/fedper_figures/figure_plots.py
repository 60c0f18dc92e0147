"""The plots, as the paper has them: by classes, spread, personal layers, ablations."""

import pathlib

import numpy as np
from cases import CASES, FEDPER, LAYERS, parts_of
from findings import LINEAR, Results, of_clients, rows_of

from fedfr_jax.runs.report import figures

# Of k, or of K_P, rising.
COLORS = ("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#000000")
SHOWN = {"fedavg": "FedAvg", FEDPER: "FedPer"}


def draw(results: Results, folder: pathlib.Path) -> None:
    """Every plot that there are rows for."""
    groups = {}
    for case in results:
        parts = parts_of(case)
        if {"fedavg", FEDPER} <= set(rows_of(results, case)) and not parts.unseen:
            group = parts.data, parts.network, parts.r, parts.n
            groups.setdefault(group, []).append(case)
    if not groups:
        return
    by_classes = {g: c for g, c in groups.items() if not parts_of(c[0]).n}
    _each_group(folder / "classes.png", results, by_classes, _curves_by_classes)
    _each_group(folder / "spread.png", results, by_classes, _spread)
    layered = {g: c for g, c in groups.items() if LAYERS[-1] in CASES[c[0]]}
    _each_group(folder / "layers.png", results, layered, _layers)
    further = lambda case: "local" in CASES[case] or case in LINEAR
    compared = {g: c for g, c in groups.items() if g in layered or further(c[0])}
    _each_group(folder / "others.png", results, compared, _others)


def _each_group(path, results, groups, panel):
    """A panel for each (data, network, rounds, images per client)."""
    if not groups:
        return
    figure, grid = figures.panels(len(groups), 4.4, 3.4)
    for axes, (group, cases) in zip(grid, groups.items(), strict=True):
        data, network, rounds, images = group
        panel(axes, results, cases)
        title = f"{data}, {network}, {rounds} rounds"
        title += f", {images:,} images per client" if images else ""
        axes.set_title(title, fontsize=10)
        ylabel = "accuracy of a client" if panel is _spread else "mean over clients"
        axes.set_ylabel(ylabel)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
            axes.legend(fontsize=7, ncols=3, **below)
    figure.savefig(path, dpi=110)


def _curve(axes, results, case, row, **style):
    """Mean over seeds with the band of their extremes; a level without rounds."""
    seeds = [rows[row]["of_round"] for rows in results[case].values()]
    if not seeds[0]:
        axes.axhline(of_clients(results, case, row).mean(), **style)
        return
    curves = np.array([curve[: min(map(len, seeds))] for curve in seeds])
    rounds = np.arange(1, curves.shape[1] + 1)
    (line,) = axes.plot(rounds, curves.mean(axis=0), **style)
    low, high = curves.min(axis=0), curves.max(axis=0)
    axes.fill_between(rounds, low, high, color=line.get_color(), alpha=0.15, lw=0)
    axes.set_xlabel("round")


def _curves_by_classes(axes, results, cases):
    """FedPer and FedAvg by k, as the paper's figure 2."""
    for case, color in zip(cases, COLORS, strict=False):
        for row, dash in (("fedavg", "--"), (FEDPER, "-")):
            label = f"{SHOWN[row]}, k = {parts_of(case).k}"
            style = {"color": color, "linestyle": dash, "label": label}
            _curve(axes, results, case, row, **style)


def _spread(axes, results, cases):
    """Every client of every seed after the last round, of the paper's figure 3."""
    ticks = []
    for case, color in zip(cases, COLORS, strict=False):
        for row in SHOWN:
            values, place = of_clients(results, case, row).ravel(), len(ticks)
            offset = (np.arange(values.size) * 0.618034 % 1.0 - 0.5) * 0.4
            axes.plot(place + offset, values, "o", color=color, ms=3, alpha=0.5)
            low, middle, high = np.percentile(values, [25, 50, 75])
            axes.vlines(place, low, high, color="black", lw=5, alpha=0.3)
            axes.plot(place, middle, "_", color="black", ms=16)
            ticks.append(f"{SHOWN[row]}\nk = {parts_of(case).k}")
    axes.set_xticks(range(len(ticks)), ticks, fontsize=7)


def _layers(axes, results, cases):
    """A curve per K_P, as the paper's figure 4; 0 is FedAvg."""
    case = cases[0]
    known = rows_of(results, case)
    for number, (row, color) in enumerate(zip(LAYERS, COLORS, strict=True)):
        if row in known:
            _curve(axes, results, case, row, color=color, label=f"K_P = {number}")
    axes.set_xlabel(f"round (k = {parts_of(case).k})")


def _others(axes, results, cases):
    """Fine-tuning, a linear base, training alone and centrally, beside the two."""
    case = cases[0]
    known = [row for row in rows_of(results, case) if row not in LAYERS or row in SHOWN]
    colors = [style["color"] for style in figures.styles([*known, "linear"]).values()]
    for row, color in zip(known, colors, strict=False):
        _curve(axes, results, case, row, color=color, label=SHOWN.get(row, row))
    linear = LINEAR.get(case)
    if linear and rows_of(results, linear):
        style = {"color": colors[-1], "linestyle": ":", "label": "linear base"}
        _curve(axes, results, linear, FEDPER, **style)
