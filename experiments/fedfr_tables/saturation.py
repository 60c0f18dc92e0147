"""Generic and personalized metrics of the pretrained network over its epochs.

    python experiments/fedfr_tables/saturation.py --workdir=runs/saturation_omniglot \
        --config=configs/fedfr/table_omniglot.py [--epochs=2,4,8,16] [--seeds=0]

Orderings are judged from a network whose generic metric has stopped rising: this is
how to choose `pretrain.epochs`. Every number of epochs is a run with its own schedule.
Judged on a validation split, so that no choice sees the images that the tables are
judged on; --no-validation judges as they do.
"""

import sys

from orderings import made, table, write_between, write_results
from run import (
    judged,
    name_of,
    remember_programs,
    run_seed,
    study_parser,
    use_every_core,
)

from fedfr_jax.cli.flags import names, parse


def main(argv: list[str]) -> None:
    """Pretrain for every number of epochs, then write results and table."""
    parser = study_parser("saturation.py", __doc__)
    parser.add_argument("--epochs", type=names, default=["2", "4", "8", "16"])
    values = parse(parser, argv)
    folder, config = judged(values, "saturation.py")
    remember_programs(folder)
    runs = {}
    for seed in values.seeds:
        runs[seed] = {}
        for epochs in values.epochs:
            place = folder / f"epochs{epochs}" / f"seed{seed}"
            one = with_epochs(config, int(epochs))
            row = run_seed(one, int(seed), place, ["pretrained"])["pretrained"]
            runs[seed][f"{epochs} epochs"] = row
    name = f"{name_of(argv)} saturation"
    target = values.results
    runs = write_results(target / "results.json", name, runs)  # with earlier epochs
    text = f"{made(runs)}\n\n{table(runs, has_costs=False)}"
    write_between(target / "RESULTS.md", name, text)
    print(text)


def with_epochs(config, epochs: int):
    """The config with a pretraining of `epochs` and no federated row."""
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.pretrain.epochs = epochs
        config.methods = {}
    return config


if __name__ == "__main__":
    use_every_core()
    main(sys.argv[1:])
