"""Ways to fine-tune one trained network over clients: all methods, and the table.

    python experiments/adaptation/run.py --config=classification/adaptation \
        --workdir=runs/adaptation [--seeds=0] \
        [--cases=base,one_shot,head,network,after]

Trains configs/classification/adaptation.py, the base first, and continues where it was
stopped. Writes results.json and the part of RESULTS.md between markers, beside this
file or under --results.
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOM = HERE.parent
sys.path[:0] = map(str, (ROOM.parent, ROOM, ROOM / "fedfr_tables"))

import studies  # noqa: E402
from orderings import made  # noqa: E402

from fedfr_jax.distributed import use_every_core  # noqa: E402

CASES = ("base", "one_shot", "head", "network", "after")
NAMES = {
    "means": "class means, one round",
    "gaussian": "Gaussian classes, one round",
    "ridge": "ridge regression, one round",
    "head": "FedAvg of the classifier",
    "lora": "FedAvg of LoRA and classifier",
    "full": "FedAvg of everything",
}


def config_of(config, case: str, seed: int):
    """The config of a case."""
    from fedfr_jax.config.files import find, load

    config = load(find("classification/adaptation"), case)
    with config.unlocked():
        config.seed = seed
    return config


def prepare(config, case: str, folder: pathlib.Path):
    """The config with the weights that its methods start from."""
    if case != "base":
        first, stage = ("one_shot", "gaussian") if case == "after" else ("base", "base")
        with config.unlocked():
            start = folder.parent.parent / first / folder.name / stage
            config.pretrain.init = str(start)
    return config


def kept(experiment, found, folder: pathlib.Path) -> dict:
    """Accuracy on the test images of all clients, and what was sent."""
    del folder
    sent = found["communication"].metrics if "communication" in found else {}
    return {
        "accuracy": found["generic"].metrics["accuracy"],
        "rounds": experiment.federation.rounds,
        "upload_mb": sent.get("upload_mb"),
    }


def text(results: dict) -> str:
    """What stands between the markers: a line of each method, by case and seed."""
    lines = [
        "| way | accuracy, % | rounds | a client sends, KB a round | in all, KB | "
        "core seconds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for case, runs in results.items():
        if case == "base":
            continue
        for seed, rows in runs.items():
            for name in (name for name in NAMES if name in rows):
                row, more = rows[name], ", from `gaussian`" * (case == "after")
                kilobytes = 1000 * row["upload_mb"]
                cells = [
                    f"{NAMES[name]} (`{name}`){more}"
                    + f", seed {seed}" * (seed != "0"),
                    f"{100 * row['accuracy']:.1f}",
                    f"{row['rounds']}",
                    f"{kilobytes:.0f}",
                    f"{kilobytes * row['rounds']:.0f}",
                    f"{row['cost']['core_seconds']:.0f}",
                ]
                lines.append(f"| {' | '.join(cells)} |")
    base = [rows["base"] for rows in results["base"].values()]
    note = ", ".join(
        f"{100 * row['accuracy']:.1f} % of its own characters' test images, "
        f"{row['cost']['core_seconds']:.0f} core seconds"
        for row in base
    )
    stamps = "; ".join(dict.fromkeys(made(runs) for runs in results.values()))
    return "\n".join([f"{stamps}. The base: {note}.", "", *lines])


STUDY = studies.Study(HERE, dict.fromkeys(CASES, ()), config_of, kept, text, prepare)

if __name__ == "__main__":
    use_every_core()
    studies.main(STUDY, __doc__, sys.argv[1:])
