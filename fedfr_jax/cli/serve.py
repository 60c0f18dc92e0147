"""Serve the pages of a folder of runs, live, in a browser."""

import sys
import threading
import time
import webbrowser

from fedfr_jax.cli.flags import add_switch, count, new_parser, parse_flags
from fedfr_jax.text import printable, without_secrets

ABOUT = """\
Serve the list of a folder's runs and their reports, which are updated while the runs
train. Only this machine can open the pages; with another --host an address with a token
is printed, which a browser needs once. The pages cannot change anything. Runs in a
bucket are fetched every minute.

  fedfr serve runs/
  fedfr serve gs://my-bucket/runs"""
FETCH_SECONDS = 60.0  # between two downloads from a bucket


def main(argv: list[str]) -> None:
    """Run the command on its arguments."""
    parser = new_parser("fedfr serve", ABOUT, epilog="")
    parser.add_argument("folder", nargs="?", default="runs", metavar="FOLDER")
    parser.flag("--host", "ADDRESS", "address to listen on", default="127.0.0.1")
    port = "port to listen on; 0 takes a free one"
    parser.flag("--port", "N", port, type=count, default=8000)
    add_switch(parser, "open", "open the list in a browser")
    values = parse_flags(parser, argv)
    from fedfr_jax.files import is_url
    from fedfr_jax.runs.remote import fetch_runs
    from fedfr_jax.viewer.server import serve

    folder = fetch_runs(values.folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} must be a folder of runs, but does not exist.")
    if is_url(values.folder):
        keep_fetching(values.folder)

    def started(address: str) -> None:
        shown = without_secrets(values.folder)
        print(f"{address}  (runs in {shown}; Ctrl-C stops)", flush=True)
        if values.open and not webbrowser.open(address):
            print("No browser was found: open the address in one.", flush=True)

    serve(folder, host=values.host, port=values.port, started=started)


def keep_fetching(url: str) -> None:
    """Fetch the runs of a bucket again and again, until the process ends."""
    from fedfr_jax.runs.remote import fetch_runs

    def fetch():
        while True:
            time.sleep(FETCH_SECONDS)
            try:
                fetch_runs(url)
            except (OSError, ValueError) as error:  # the pages show the earlier state
                text = printable(without_secrets(str(error)))
                print(text, file=sys.stderr, flush=True)

    threading.Thread(target=fetch, daemon=True).start()
