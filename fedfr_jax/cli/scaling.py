"""Fit scaling laws to a table of runs, or to the results of a sweep."""

import argparse
import pathlib
from collections.abc import Sequence

from fedfr_jax.cli.flags import count, names, new_parser, parse_flags

ABOUT = """\
Fit scaling laws to TABLE: the folder of a sweep, a .csv, .json or .jsonl file of rows,
or bigface, the points that BigFace published. A row has the parameters of a run
(params_backbone, params_with_head, params_active), perhaps num_images, num_identities,
num_images_seen and flops, a column to fit, and perhaps a name and a series.

A pure power law, a saturating and a joint one are fitted; AICc chooses. Printed, and
written to --workdir, are the laws with 90 % intervals, the prediction of the largest
runs by the others, and the best network for a budget of operations; with --workdir also
plots.

  fedfr scaling runs/sweep --score=fedavg/generic/accuracy
  fedfr scaling bigface --error=challenge --compare=scratch,distilled --workdir=out"""
H200_DAY = "h200-day"


def main(argv: list[str]) -> None:
    """Run the command on its arguments."""
    parser = new_parser("fedfr scaling", ABOUT, epilog="")
    parser.add_argument("table", metavar="TABLE", nargs="?")
    fitted = parser.add_mutually_exclusive_group()
    fitted.add_argument(
        "--error", metavar="COLUMN", help="column to fit, smaller is better"
    )
    fitted.add_argument(
        "--score", metavar="COLUMN", help="column to fit, in [0, 1), larger is better"
    )
    parser.add_argument("--series", default="series", metavar="COLUMN")
    amount = "column with the amount of data D"
    parser.flag("--data_column", "COLUMN", amount, default="num_images")
    arrows = "two series: the plot has arrows from A to B"
    parser.flag("--compare", "A,B", arrows, type=names, default=())
    parser.flag(
        "--budgets",
        "F,G",
        f"budgets in operations, or {H200_DAY} (always: powers of ten near the runs')",
        type=budgets,
        default=(),
    )
    samples = "bootstrap samples of the intervals"
    parser.flag("--num_resamples", "N", samples, type=count, default=200)
    parser.flag("--seed", "N", "seed of the intervals", type=count, default=0)
    parser.flag("--workdir", "DIR", "folder for tables and plots")
    values = parse_flags(parser, argv)
    if values.table is None or not (values.error or values.score):
        raise ValueError(
            f"fedfr scaling needs a TABLE and one of --error and --score, got {argv}."
        )
    run(values)


def budgets(text: str) -> list[float]:
    """Parse a flag's value as FLOPs."""
    from fedfr_jax.scaling.study import H200_DAY as OPERATIONS

    result = []
    for word in names(text):
        try:
            result.append(OPERATIONS if word == H200_DAY else float(word))
        except ValueError:
            result.append(float("nan"))
        if not 0 < result[-1] < float("inf"):
            raise argparse.ArgumentTypeError(
                f"must be positive numbers or {H200_DAY}, got {word!r}"
            )
    return result


def run(values: argparse.Namespace) -> None:
    """Read the table, fit the laws, print them; write files if there is a folder."""
    from fedfr_jax import scaling
    from fedfr_jax.files import write_text
    from fedfr_jax.runs.sinks import summary_text

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
        write_text(folder / "scaling.json", summary_text(scaling.as_json(study)))
        write_text(folder / "scaling.md", text)
        for path in [folder / "scaling.json", *draw(study, folder, values.compare)]:
            print(path)


def draw(study, folder: pathlib.Path, arrows: Sequence[str]) -> list[pathlib.Path]:
    """Draw a study's charts as .svg, .png and .pdf."""
    from fedfr_jax.runs.report.drawing import save
    from fedfr_jax.runs.report.scaling import law_charts, score_charts

    paths = save(folder / "scores", score_charts(study.points, arrows=arrows))
    laws = law_charts(study)
    return paths + save(folder / "laws", laws) if laws else paths
