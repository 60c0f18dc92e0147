"""The field's methods side by side: every row of some sets, and the table of them.

    python experiments/comparison/run.py --workdir=runs/comparison [--sets=mnist,...] \
        [--seeds=0] [--rows=fedavg,...] [--config.section.key=value ...]

Trains configs/classification/comparison.py, each row in a folder of its own, and goes
on where it was stopped. Writes results.json, which keeps what was there, and the part
of RESULTS.md between markers, beside this file or under --results, after every row, and
prints the tables of the sets at the end.
"""

import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOM = HERE.parent
sys.path[:0] = map(str, (ROOM.parent, ROOM, HERE, ROOM / "fedfr_tables"))

import comparison_tables  # noqa: E402
import studies  # noqa: E402
from orderings import provenance  # noqa: E402

from fedfr_jax.cli.flags import define, names, new_parser, parse, workdir  # noqa: E402
from fedfr_jax.distributed import use_every_core  # noqa: E402

CONFIG = "classification/comparison"
SETS = ("fashion_mnist", "mnist", "cifar10", "cifar100", "cifar100_resnet", "emnist")
JUDGED = ("generic", "personalized", "finetuned", "communication")


def one_row(config, name: str, seed: int):
    """`config` with one of its rows and a seed."""
    with config.unlocked():
        config = config.copy_and_resolve_references()
        config.seed = config.partition.seed = seed
        config.methods = {name: config.methods[name]}
    return config


def kept(experiment, found, folder: pathlib.Path) -> dict:
    """What a row is told by: numbers of every evaluator."""
    del experiment, folder
    return {name: dict(found[name].metrics) for name in JUDGED if name in found}


STUDY = studies.Study(
    folder=HERE,
    cases=dict.fromkeys(SETS, ()),  # whatever rows a set has
    config_of=lambda config, case, seed: config,
    kept=kept,
    text=comparison_tables.text,
)


def play(config, word: str, name: str, seed: int, folder: pathlib.Path) -> dict:
    """{row: what is kept of it}; of one that diverges, where it did."""
    try:
        return studies.run_case(STUDY, one_row(config, name, seed), word, seed, folder)
    except FloatingPointError as error:
        print(f"{word}, {name}: {error}", flush=True)
        return {name: {"made": provenance(), "diverged": str(error)}}


def main(argv: list[str]) -> None:
    """Play what is missing, row by row."""
    parser = new_parser("run.py", __doc__)
    define(parser)
    parser.add_argument("--sets", type=names, default=list(SETS))
    parser.add_argument("--rows", type=names, default=[])
    parser.add_argument("--seeds", type=names, default=["0"])
    parser.add_argument("--results", type=pathlib.Path, default=HERE)
    first = parse(parser, [f"--config={CONFIG}", *argv])
    folder = workdir(first.workdir)
    studies.remember_programs(folder)
    configs = {
        word: parse(parser, [f"--config={CONFIG}:{word}", *argv]).config
        for word in first.sets
    }
    known = {name for config in configs.values() for name in config.methods}
    if unknown := sorted({*first.rows} - known):
        raise ValueError(f"--rows must be of {sorted(known)}, got {unknown}.")
    for word, config in configs.items():
        for name in first.rows or config.methods:
            if name not in config.methods:  # fedbn, where there is no batch norm
                continue
            for seed in map(int, first.seeds):
                rows = play(config, word, name, seed, folder / name)
                studies.publish(STUDY, first.results, word, {str(seed): rows})
    results = json.loads((first.results / "results.json").read_text())
    found = {x: results[x]["seeds"] for x in first.sets if x in results}
    print(comparison_tables.text(found))


if __name__ == "__main__":
    use_every_core()
    main(sys.argv[1:])
