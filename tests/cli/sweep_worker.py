"""A sweep whose cells are not trained but take a moment, for tests that kill it.

python -m tests.cli.sweep_worker LOCATION CONFIG AXIS SECONDS
"""

import os
import sys
import time

from fedfr_jax.cli import main, sweep
from fedfr_jax.runs import leases

leases.BEAT_EVERY, leases.SILENT, sweep.WATCH = 0.2, 1.5, 0.2


def row_of(run, cells, changed=None):
    """A row that depends on the cell alone, and a line for each time it is made."""
    time.sleep(float(sys.argv[4]))
    with open(os.environ["MADE"], "a") as file:
        file.write(f"{run.name}\n")
    return {"run": run.name, **run.changes, "a/generic/x": hash(run.changes["seed"])}


if __name__ == "__main__":
    sweep.results_row = row_of
    location, config, axis = sys.argv[1:4]
    words = ["sweep", f"--config={config}", f"--workdir={location}", axis]
    sys.exit(main.main(words))
