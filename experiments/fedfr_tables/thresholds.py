"""The study of the threshold t_HN: how many hard negatives, what they cost and bring.

    python experiments/fedfr_tables/thresholds.py --workdir=runs/table_omniglot \
        --config=configs/fedfr/table_omniglot.py [--thresholds=0.3,...] [--seeds=0]

Trains the FedFR row at each threshold (without a cap on the number) from the pretrained
network that the table's run left in the same --workdir, or makes one.
"""

import pathlib
import sys

from absl import flags
from run import HERE, run_seed, table, use_every_core, write_between, write_results

from fedfr_jax.commands.flags import define, parse, workdir


def main(argv: list[str]) -> None:
    """Run every threshold and seed, then write results and table."""
    values = flags.FlagValues()
    define(values)
    grid = ["0.3", "0.4", "0.5", "0.6", "0.7", "0.8"]
    flags.DEFINE_list("thresholds", grid, "cosines", flag_values=values)
    flags.DEFINE_list("seeds", ["0"], "seeds to run", flag_values=values)
    flags.DEFINE_string("results", str(HERE), "where they go", flag_values=values)
    parse(values, "thresholds.py", argv)
    folder = workdir(values, "thresholds.py") / "thresholds"
    config = values["config"].value.copy_and_resolve_references()
    own = config.methods.fedfr.to_dict()
    with config.unlocked():
        config.methods = {
            f"t_HN {t}": {**own, "threshold": float(t), "max_hard_negatives": 0}
            for t in values["thresholds"].value
        }
    runs = {
        s: run_seed(config, int(s), folder / f"seed{s}") for s in values["seeds"].value
    }
    file = next(w.partition("=")[2] for w in argv if w.startswith("--config="))
    name = pathlib.Path(file).stem.removeprefix("table_") + " thresholds"
    target = pathlib.Path(values["results"].value)
    write_results(target / "results.json", name, runs)
    write_between(target / "README.md", name, table(runs))
    print(table(runs))


if __name__ == "__main__":
    use_every_core()
    main(sys.argv[1:])
