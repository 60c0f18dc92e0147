"""FedPer's figures 2 to 6 in small: every case and seed, tables and findings.

    python experiments/fedper_figures/run.py --config=configs/fedper/figures.py \
        --workdir=runs/fedper_figures [--seeds=0,1,2] [--cases=cifar10 resnet k=4,...]

Goes on where it was stopped. Writes results.json (every row of every case and seed),
the part of RESULTS.md between markers, beside this file or under
--results.
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOM = HERE.parent
sys.path[:0] = map(str, (ROOM.parent, ROOM, HERE, ROOM / "fedfr_tables"))

import cases  # noqa: E402
import class_subset  # noqa: E402
import findings  # noqa: E402
import studies  # noqa: E402

from fedfr_jax.distributed import use_every_core  # noqa: E402


def know_subset() -> None:
    """Make the subset a source that the configs of cases can name."""
    from fedfr_jax.data.sources import SOURCES, register_source

    if cases.SUBSET not in SOURCES:
        register_source(cases.SUBSET, class_subset.class_subset)


def kept(experiment, found, folder: pathlib.Path) -> dict:
    """Accuracies of a row: of both protocols, of every client and of every round.

    Where there are clients that no round sees: theirs, and those after fine-tuning.
    """
    from fedfr_jax.runs.sinks import read_jsonl

    curve = "personalized/accuracy"
    further = ("finetuned", "unseen", "unseen_finetuned")
    told = {name: found[name].per_client for name in further if name in found}
    lines = read_jsonl(folder / "metrics.jsonl")
    return {
        "generic": dict(found["generic"].metrics),
        "personalized": dict(found["personalized"].metrics),
        "of_client": found["personalized"].per_client["accuracy"].tolist(),
        "of_round": [line[curve] for line in lines if curve in line],
        **{name: values["accuracy"].tolist() for name, values in told.items()},
    }


STUDY = studies.Study(HERE, cases.CASES, cases.config_of, kept, findings.text)

if __name__ == "__main__":
    use_every_core()
    know_subset()
    studies.main(STUDY, __doc__, sys.argv[1:])
