"""List the runs in a folder: state, round, last metrics, age."""

import json
import sys

from fedfr_jax.cli.flags import add_switch, new_parser, parse_flags
from fedfr_jax.text import printable

ABOUT = """\
List the runs in and below a folder.

A WORD selects runs with it in their name; KEY=VALUE those with that state, task, stage
or value of a config's key.

  fedfr runs runs/ state=running
  fedfr runs runs/ seed=0 --metric=personalized/tar@far=1e-03 --sort=age"""


def main(argv: list[str]) -> None:
    """Run the command on its arguments."""
    parser = new_parser("fedfr runs", ABOUT, epilog="")
    parser.add_argument("folder", nargs="?", default="runs", metavar="FOLDER")
    parser.add_argument("words", nargs="*", metavar="WORD", help="filters")
    columns = "name, state, age, seconds, round or a metric"
    parser.flag("--sort", "COLUMN", columns, default="name")
    metric = "metric to show, as evaluator/metric (default the first)"
    parser.flag("--metric", "METRIC", metric, default="")
    add_switch(parser, "json", "print a JSON list, with all metrics")
    values = parse_flags(parser, argv)
    from fedfr_jax.runs.remote import fetch_runs
    from fedfr_jax.viewer.runs_table import list_runs, sort_rows

    folder = values.folder
    rows, problems = list_runs(fetch_runs(folder), values.words, values.metric)
    rows = sort_rows(rows, values.sort) if rows else rows
    if values.json:
        print(json.dumps(rows, indent=1))
    elif rows:
        print_table(rows)
    else:
        which = " that fits" if values.words else ""
        print(
            f"No run{which} in {folder}. fedfr train --workdir={folder}/NAME makes one."
        )
    for problem in problems:
        print(problem, file=sys.stderr)


def print_table(rows: list[dict]) -> None:
    """Print a table with a line per run."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("run", "state", "task", "stage", "round", "last metric", "age"):
        table.add_column(name, no_wrap=True)
    styles = {"running": "blue", "finished": "green", "stopped": "yellow"}
    for row in rows:
        num_rounds = f"/{row['rounds']}" if row["rounds"] else ""
        value = row["metric_value"]
        metric = f"{row['metric']} {value:.4g}" if value is not None else "-"
        texts = [row["name"], row["state"], row["task"], row["stage"]]
        texts += [f"{row['round']}{num_rounds}", metric, row["age"]]
        cells = [Text(printable(text)) for text in texts]  # names may hold markup
        cells[1].stylize(styles.get(row["state"], "red"))
        table.add_row(*cells)
    console = Console()
    width = max(console.width, Console(width=10_000).measure(table).maximum)
    Console(width=width).print(table)
