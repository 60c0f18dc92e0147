"""Write one HTML page of one or several runs."""

import pathlib
import webbrowser
from collections.abc import Sequence

from fedfr_jax.cli.flags import add_switch, new_parser, parse_flags

ABOUT = """\
Write a report of runs: one HTML file with tables, curves, error rates, clients, costs,
images, config and versions, and the differences between the runs. It needs no network
and no other file. A run that is still training is shown as far as it is.

  fedfr report runs/demo
  fedfr report runs/a runs/b --output=compared.html"""


def main(argv: list[str]) -> None:
    """Run the command on its arguments."""
    parser = new_parser("fedfr report", ABOUT, epilog="")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories")
    parser.flag(
        "--output",
        "HTML",
        "file to write (default report.html, in the run if there is one on this disk)",
    )
    add_switch(parser, "open", "open the page in a browser")
    values = parse_flags(parser, argv)
    if not values.runs:
        raise ValueError(
            f"{parser.prog} needs a run directory: fedfr report runs/demo."
        )
    from fedfr_jax.files import is_url
    from fedfr_jax.runs.remote import fetch, is_reported

    folders = [fetch(run, is_reported) for run in values.runs]
    is_inside = len(folders) == 1 and not is_url(values.runs[0])
    default = folders[0] / "report.html" if is_inside else "report.html"
    path = pathlib.Path(values.output or default)
    from fedfr_jax.files import write_text
    from fedfr_jax.viewer.page import render
    from fedfr_jax.viewer.run_files import read_run

    names = distinct_names(folders)
    runs = [read_run(x, name=name) for x, name in zip(folders, names, strict=True)]
    write_text(path, render(runs))
    print(path)
    if values.open and not webbrowser.open(path.resolve().as_uri()):
        print(f"No browser was found: open {path.resolve()} in one.")


def distinct_names(folders: Sequence[pathlib.Path]) -> list[str]:
    """Shortest endings of the paths that are distinct.

    >>> distinct_names([pathlib.Path("a/run"), pathlib.Path("b/run")])
    ['a/run', 'b/run']
    """
    paths = [folder.resolve() for folder in folders]
    depth = 1
    while depth < max(len(path.parts) for path in paths):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len({*names}) == len({*paths}):
            return names
        depth += 1
    return [str(path) for path in paths]
