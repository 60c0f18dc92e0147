"""The plots: laws with bands, scratch to distilled, masked against standard."""

import pathlib
from collections.abc import Mapping

from scaling_cells import DISTILLED, RATIOS, SCRATCH
from scaling_tables import (
    MASKED,
    SCORE,
    SIZES,
    STANDARD,
    TAR,
    Results,
    in_common,
    over_seeds,
    points_of,
    rows_of,
    trade,
    values_of,
)

from fedfr_jax.runs.report import figures
from fedfr_jax.runs.report.scaling import plot_laws, plot_scores
from fedfr_jax.scaling import Study

COLOR = "#0072B2"


def draw(results: Results, laws: Mapping[str, Study], folder: pathlib.Path) -> None:
    """Every plot that there are rows for, as .png."""
    for name, of in zip(("laws", "masked_laws"), laws.values(), strict=False):
        keep_png(plot_laws(folder / name, of))
    for name, metric, is_score in (("sizes", TAR, True), ("mfr", SCORE, False)):
        arrows(results, folder / f"{name}_distilled", metric, is_score)
    if trade(results) is not None:
        ratios(results, folder / "ratios.png")


def keep_png(paths) -> None:
    """Remove the files of other kinds."""
    for path in paths:
        if path.suffix != ".png":
            path.unlink()


def arrows(results: Results, path: pathlib.Path, metric: str, is_score: bool) -> None:
    """Students alone and distilled, as BigFace draws them, the large one beside."""
    parts = SIZES[0], "distilled"
    rows = over_seeds(rows_of(in_common(results, *parts), *parts), metric)
    found = points_of(rows, metric, is_score)
    if found and {SCRATCH, DISTILLED} <= {*found.series}:
        keep_png(plot_scores(path, found, arrows=(SCRATCH, DISTILLED)))


def ratios(results: Results, path: pathlib.Path) -> None:
    """Masked over standard error, a point per ratio and seed, joined at their means."""
    figure, (axes,) = figures.panels(1, 4.8, 3.8)
    means = trade(results)
    axes.plot(means[:, 1], means[:, 0], color=COLOR, lw=1, alpha=0.6)
    for ratio, (masked, standard) in zip(RATIOS, means, strict=True):
        name = f"ratio {ratio:g}"
        seeds = (values_of(results, "masks", name, m) for m in (STANDARD, MASKED))
        axes.plot(*seeds, "o", color=COLOR)
        style = {"xytext": (6, 4), "textcoords": "offset points", "fontsize": 9}
        axes.annotate(f"{ratio:g}", (standard, masked), **style)
    axes.set_xlabel("standard FNMR at FPR 0.01")
    axes.set_ylabel("masked FNMR at FPR 0.01")
    axes.set_title("share of masked training images", fontsize=10)
    axes.margins(0.15)
    axes.locator_params(axis="x", nbins=5)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
