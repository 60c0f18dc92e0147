"""Fit scaling laws to a table of runs, or to the results of a sweep."""

import argparse
import pathlib
from collections.abc import Sequence

from fedfr_jax.cli.flags import count, names, new_parser, parse_flags

ABOUT = """\
Fit scaling laws to TABLE: the folder of a sweep, a .csv, .json or .jsonl file of rows,
or bigface, the points that BigFace published. A row has the parameters of a run
(params_backbone, params_with_head, params_active), perhaps num_images, num_identities,
num_images_seen and flops, a column that is judged, and perhaps a name and a series.

A pure power law, a saturating and a joint one are fitted; AICc chooses. Printed, and
written to --workdir, are the laws with 90 % intervals, what the other runs say of the
largest, and the best network for a budget of operations; with --workdir also plots.

  fedfr scaling runs/sweep --score=fedavg/generic/accuracy
  fedfr scaling bigface --error=challenge --compare=scratch,distilled --workdir=out"""
H200_DAY = "h200-day"


def main(argv: list[str]) -> None:
    """Run the command on its arguments."""
    parser = new_parser("fedfr scaling", ABOUT, epilog="")
    parser.add_argument("table", metavar="TABLE", nargs="?")
    judged = parser.add_mutually_exclusive_group()
    judged.add_argument(
        "--error", metavar="COLUMN", help="column to fit, smaller is better"
    )
    judged.add_argument(
        "--score", metavar="COLUMN", help="column to fit, in [0, 1), larger is better"
    )
    parser.add_argument("--series", default="series", metavar="COLUMN")
    parser.add_argument(
        "--data_column",
        default="num_images",
        metavar="COLUMN",
        help="column with the amount of data D (default num_images)",
    )
    parser.add_argument(
        "--compare",
        type=names,
        default=(),
        metavar="A,B",
        help="two series: the plot has arrows from A to B",
    )
    parser.add_argument(
        "--budgets",
        type=budgets,
        default=(),
        metavar="F,G",
        help=f"budgets in operations, or {H200_DAY} (always: powers of ten near the "
        "runs')",
    )
    parser.add_argument(
        "--num_resamples",
        type=count,
        default=200,
        metavar="N",
        help="bootstrap samples of the intervals (default 200)",
    )
    parser.add_argument(
        "--seed", type=count, default=0, help="seed of the intervals (default 0)"
    )
    parser.add_argument("--workdir", metavar="DIR", help="folder for tables and plots")
    values = parse_flags(parser, argv)
    if values.table is None or not (values.error or values.score):
        raise ValueError(
            f"fedfr scaling needs a TABLE and one of --error and --score, got {argv}."
        )
    run(values)


def budgets(text: str) -> list[float]:
    """Parse a flag's value as FLOPs."""
    from fedfr_jax.scaling.study import H200_DAY as OPERATIONS

    found = []
    for word in names(text):
        try:
            found.append(OPERATIONS if word == H200_DAY else float(word))
        except ValueError:
            found.append(float("nan"))
        if not 0 < found[-1] < float("inf"):
            says = f"must be positive numbers or {H200_DAY}, got {word!r}"
            raise argparse.ArgumentTypeError(says)
    return found


def run(values: argparse.Namespace) -> None:
    """Read the table, fit the laws, print them; write files if there is a folder."""
    from fedfr_jax import scaling
    from fedfr_jax.runs.sinks import write_summary, write_text

    points = scaling.points(
        scaling.read_rows(values.table),
        values.score or values.error,
        is_score=bool(values.score),
        series=values.series,
    )
    study = scaling.study(
        points,
        data=values.data_column,
        seed=values.seed,
        draws=values.num_resamples,
        more_budgets=values.budgets,
    )
    text = scaling.markdown(study)
    print(text)
    if values.workdir:
        folder = pathlib.Path(values.workdir)
        write_summary(folder / "scaling.json", scaling.as_json(study))
        write_text(folder / "scaling.md", text)
        for path in [folder / "scaling.json", *draw(study, folder, values.compare)]:
            print(path)


def draw(study, folder: pathlib.Path, arrows: Sequence[str]) -> list[pathlib.Path]:
    """Plot a study, as .png and .pdf."""
    from fedfr_jax.runs.report.scaling import plot_laws, plot_scores

    scores = plot_scores(folder / "scores", study.points, arrows=arrows)
    return scores + plot_laws(folder / "laws", study)
