"""The study of the clients' learning rate, by the rows that FedFR is compared with.

    python experiments/fedfr_tables/rates.py --workdir=runs/rates_lfw \
        --config=configs/fedfr/table_lfw.py [--rates=3e-4,1e-3,3e-3] [--seeds=0]

Trains local and federated averaging at every rate, so that the rate of a table is the
one that suits the rows below FedFR. Judged on a validation split, so that no choice
sees the images that the tables are judged on; --no-validation judges as they do.
"""

import pathlib
import sys

from orderings import made, mean_rate, rows_of_all, table, write_between, write_results
from run import (
    HERE,
    add_validation,
    judged,
    name_of,
    remember_programs,
    run_seed,
    use_every_core,
)

from fedfr_jax.commands.flags import define, names, new_parser, parse

ROWS = ("local", "fedavg")


def main(argv: list[str]) -> None:
    """Train both rows at every rate, then write results and table."""
    parser = new_parser("rates.py", __doc__)
    define(parser)
    parser.add_argument("--rates", type=names, default=["3e-4", "1e-3", "3e-3"])
    parser.add_argument("--seeds", type=names, default=["0"])
    add_validation(parser)
    parser.add_argument("--results", type=pathlib.Path, default=HERE)
    values = parse(parser, argv)
    folder, config = judged(values, "rates.py")
    remember_programs(folder)
    config = at_rates(config, values.rates)
    rows = ["pretrained", *config.methods]
    runs = {
        seed: run_seed(config, int(seed), folder / f"seed{seed}", rows)
        for seed in values.seeds
    }
    name = f"{name_of(argv)} rates"
    runs = write_results(values.results / "results.json", name, runs)
    text = f"{made(runs)}\n\n{table(runs)}\n\n{means(runs)}"
    write_between(values.results / "README.md", name, text)
    print(text)


def at_rates(config, rates: list[str]):
    """The config with both rows at every rate, and no other.

    A row is called after its rate in millionths, as keys of a config hold no dots.
    """
    config = config.copy_and_resolve_references()
    own = {row: config.methods[row].to_dict() for row in ROWS}
    with config.unlocked():
        config.methods = {
            f"{1e6 * float(rate):.0f}e-6 {row}": {
                **own[row],
                "learning_rate": float(rate),
            }
            for rate in rates
            for row in ROWS
        }
    return config


def means(runs: dict) -> str:
    """Markdown: the mean of the personalised rates, which decides."""
    lines = ["| row | mean of the personalised rates |", "|---|---|"]
    for row in rows_of_all(runs):
        mean = 100 * mean_rate(runs, row, "personalised").mean()
        lines.append(f"| {row} | {mean:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    use_every_core()
    main(sys.argv[1:])
