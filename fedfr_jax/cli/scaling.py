"""Fit scaling laws to a table of runs, or to the results of a sweep."""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Annotated

from fedfr_jax.cli.flags import names

H200_DAY = "h200-day"


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


def scaling(
    table: str | None = None,
    *,
    error: str | None = None,
    score: str | None = None,
    series: str = "series",
    data_column: str = "num_images",
    compare: tuple[str, ...] = (),
    budgets: Annotated[Sequence[float], budgets] = (),
    num_resamples: int = 200,
    seed: int = 0,
    workdir: str | None = None,
) -> None:
    """Fit scaling laws to a table of runs, or to the results of a sweep.

    TABLE is the folder of a sweep, a .csv, .json or .jsonl file of rows, or bigface,
    the points that BigFace published. A row has the parameters of a run
    (params_backbone, params_with_head, params_active), perhaps num_images,
    num_identities, num_images_seen and flops, a column to fit, and perhaps a name and a
    series.

    A pure power law, a saturating and a joint one are fitted; AICc chooses. Printed,
    and written to --workdir, are the laws with 90 % intervals, the prediction of the
    largest runs by the others, and the best network for a budget of operations; with
    --workdir also plots.

      fedfr scaling runs/sweep --score=fedavg/generic/accuracy
      fedfr scaling bigface --error=challenge --compare=scratch,distilled --workdir=out

    Args:
      table: TABLE of runs
      error: COLUMN column to fit, smaller is better
      score: COLUMN column to fit, in [0, 1), larger is better
      series: COLUMN column with the series of a run
      data_column: COLUMN column with the amount of data D
      compare: A,B two series: the plot has arrows from A to B
      budgets: F,G budgets in operations, or h200-day (always: powers of ten near the
        runs')
      num_resamples: N bootstrap samples of the intervals
      seed: N seed of the intervals
      workdir: DIR folder for tables and plots
    """
    if table is None or bool(error) == bool(score):
        raise ValueError("fedfr scaling needs a TABLE and one of --error and --score.")
    from fedfr_jax import scaling
    from fedfr_jax.files import write_text
    from fedfr_jax.runs.sinks import summary_text

    points = scaling.points(
        scaling.read_rows(table),
        score or error or "",
        is_score=bool(score),
        series=series,
    )
    study = scaling.study(
        points,
        data=data_column,
        seed=seed,
        draws=num_resamples,
        more_budgets=budgets,
    )
    text = scaling.markdown(study)
    print(text)
    if workdir:
        folder = pathlib.Path(workdir)
        write_text(folder / "scaling.json", summary_text(scaling.as_json(study)))
        write_text(folder / "scaling.md", text)
        for path in [folder / "scaling.json", *draw(study, folder, compare)]:
            print(path)


def draw(study, folder: pathlib.Path, arrows: Sequence[str]) -> list[pathlib.Path]:
    """Draw a study's charts as .svg, .png and .pdf."""
    from fedfr_jax.runs.report.drawing import save
    from fedfr_jax.runs.report.scaling import law_charts, score_charts

    paths = save(folder / "scores", score_charts(study.points, arrows=arrows))
    laws = law_charts(study)
    return paths + save(folder / "laws", laws) if laws else paths
