"""Commands that show runs: a table of them, one page, pages that are live."""

import json as texts
import pathlib
import sys
import threading
import time
import webbrowser
from collections.abc import Sequence

from fedfr_jax.text import printable, without_secrets

FETCH_SECONDS = 60.0  # between two downloads from a bucket


def runs(
    folder: str = "runs",
    words: Sequence[str] = (),
    *,
    sort: str = "name",
    metric: str = "",
    json: bool = False,
) -> None:
    """List the runs in a folder: state, round, last metrics, age.

    A WORD selects runs with it in their name, state, task or stage; KEY=VALUE those
    with that state, task, stage or value of a config's key.

      fedfr runs runs/ state=running
      fedfr runs runs/ seed=0 --metric=personalized/tar@far=1e-03 --sort=age

    Args:
      folder: FOLDER the runs in and below it
      words: WORD filters
      sort: COLUMN name, state, age, seconds, round or a metric
      metric: METRIC metric to show, as evaluator/metric (default the first)
      json: print a JSON list, with all metrics
    """
    from fedfr_jax.runs.buckets import fetch_runs
    from fedfr_jax.runs.run_files import RunList, sort_rows

    rows, problems = RunList(fetch_runs(folder), metric).read(words)
    rows = sort_rows(rows, sort) if rows else rows
    if json:
        print(texts.dumps(rows, indent=1))
    elif rows:
        print_table(rows)
    else:
        which = " that fits" if words else ""
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


def report(runs: Sequence[str], *, output: str | None = None, open: bool = False):
    """Write one HTML page of one or several runs.

    It has tables, curves, error rates, clients, costs, images, config and versions, and
    the differences between the runs, and needs no network and no other file. A run that
    is still training is shown as far as it is.

      fedfr report runs/demo
      fedfr report runs/a runs/b --output=compared.html

    Args:
      runs: RUN run directories
      output: HTML file to write (default report.html, in the run if there is one on
        this disk)
      open: open the page in a browser
    """
    if not runs:
        raise ValueError("fedfr report needs a run directory: fedfr report runs/demo.")
    from fedfr_jax.files import is_url, write_text
    from fedfr_jax.runs.buckets import fetch, is_reported
    from fedfr_jax.runs.run_files import read_run
    from fedfr_jax.viewer.page import render

    folders = [fetch(run, is_reported) for run in runs]
    is_inside = len(folders) == 1 and not is_url(runs[0])
    default = folders[0] / "report.html" if is_inside else "report.html"
    path = pathlib.Path(output or default)
    names = zip(folders, distinct_names(folders), strict=True)
    write_text(path, render([read_run(folder, name=name) for folder, name in names]))
    print(path)
    if open:
        open_page(path.resolve().as_uri())


def open_page(address: str) -> None:
    """Open a page in a browser, or say that there is none."""
    if not webbrowser.open(address):
        print(f"No browser was found: open {address} in one.", flush=True)


def distinct_names(folders: Sequence[pathlib.Path]) -> list[str]:
    """Shortest endings of the paths that are distinct.

    >>> distinct_names([pathlib.Path("a/run"), pathlib.Path("b/run")])
    ['a/run', 'b/run']
    """
    paths = [folder.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len({*names}) == len({*paths}):
            return names
    return [str(path) for path in paths]


def serve(
    folder: str = "runs",
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    open: bool = False,
) -> None:
    """Serve the pages of a folder of runs, live, in a browser.

    The list and the reports are updated while the runs train. Only this machine can
    open the pages; with another --host an address with a token is printed, which a
    browser needs once. The pages cannot change anything. Runs in a bucket are fetched
    every minute.

      fedfr serve runs/
      fedfr serve gs://my-bucket/runs

    Args:
      folder: FOLDER of runs
      host: ADDRESS address to listen on
      port: N port to listen on; 0 takes a free one
      open: open the list in a browser
    """
    from fedfr_jax.files import is_url
    from fedfr_jax.runs.buckets import fetch_runs
    from fedfr_jax.viewer.server import serve

    local = fetch_runs(folder)
    if not local.is_dir():
        raise ValueError(f"{local} must be a folder of runs, but does not exist.")
    if is_url(folder):
        keep_fetching(folder)

    def started(address: str) -> None:
        shown = without_secrets(folder)
        print(f"{address}  (runs in {shown}; Ctrl-C stops)", flush=True)
        if open:
            open_page(address)

    serve(local, host=host, port=port, started=started)


def keep_fetching(url: str) -> None:
    """Fetch the runs of a bucket again and again, until the process ends."""
    from fedfr_jax.runs.buckets import fetch_runs

    def fetch():
        while True:
            time.sleep(FETCH_SECONDS)
            try:
                fetch_runs(url)
            except (OSError, ValueError) as error:  # the pages show the earlier state
                text = printable(without_secrets(str(error)))
                print(text, file=sys.stderr, flush=True)

    threading.Thread(target=fetch, daemon=True).start()
