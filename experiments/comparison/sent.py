"""Megabytes that every row of a set sends, from its shapes: nothing is trained.

    python experiments/comparison/sent.py --set=fashion_mnist

Fills `communication` of the rows of seed 0 that results.json has, and writes the
tables of RESULTS.md anew. `run.py` measures the same when it plays a row.
"""

import argparse
import json
import pathlib
import tempfile

import run
import studies

from fedfr_jax.cli.flags import define, new_parser, parse
from fedfr_jax.config.build import build
from fedfr_jax.runs.costs import communication
from fedfr_jax.runs.stages import start_stage
from fedfr_jax.types import FederatedTrainer


def sent(config, name: str) -> dict[str, float]:
    """Megabytes up and down of a row, and in all; nothing for a central one."""
    experiment = build(run.one_row(config, name, seed=0))
    trainer = experiment.stages[name].trainer
    if not isinstance(trainer, FederatedTrainer):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        begun = start_stage(experiment, trainer, None, pathlib.Path(folder))
        begun.checkpointer.close()
        return communication(begun, config.federation.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--set", choices=run.SETS, required=True)
    word = parser.parse_args().set
    flags = new_parser("sent.py", __doc__)
    define(flags)
    config = parse(flags, [f"--config={run.CONFIG}:{word}"]).config
    rows = json.loads((run.HERE / "results.json").read_text())[word]["seeds"]["0"]
    told = {
        name: {**row, "communication": sent(config, name)} for name, row in rows.items()
    }
    studies.publish(run.STUDY, run.HERE, word, {"0": told})


if __name__ == "__main__":
    main()
