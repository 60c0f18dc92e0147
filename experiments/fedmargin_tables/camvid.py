"""FedMargin on CamVid in small: rows x Dirichlet alphas x seeds, figures 7 and 8.

    python experiments/fedmargin_tables/camvid.py --workdir=runs/fedmargin_camvid \
        [--methods=...] [--alphas=0.01,0.1,1,10] [--seeds=0] [--rounds=R] \
        [--image_size=60,80]

Goes on where it was stopped: a row that is done is read. Writes results.json, where
rows and seeds that are not played stay as they were, and CAMVID.md's tables, beside
this file or under --results.
"""

import argparse
import json
import pathlib
import sys
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
ROOM = HERE.parent
sys.path[:0] = map(str, (ROOM.parent, ROOM, HERE, ROOM / "fedfr_tables"))

import camvid_tables  # noqa: E402
import run as runs  # noqa: E402
from studies import remember_programs  # noqa: E402
from tables import SEVERAL  # noqa: E402

from fedfr_jax.distributed import use_every_core  # noqa: E402

CONFIG = runs.Set("fedmargin/table_camvid.py")
CENTRAL = "central"


class Done(NamedTuple):
    """What became of a row."""

    result: dict
    network: object = None  # its variables, of a row that did not diverge


def main(argv: list[str]) -> None:
    """Run what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    words = lambda text: text.split(",")
    numbers = lambda text: [float(x) for x in words(text)]
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--methods", type=words, default=[], help="default all")
    parser.add_argument("--alphas", type=numbers, default=[0.01, 0.1, 1.0, 10.0])
    parser.add_argument("--seeds", type=words, default=["0"])
    parser.add_argument("--rounds", type=int, default=0, help="default the config's")
    parser.add_argument("--image_size", type=words, default=[])
    parser.add_argument("--results", type=pathlib.Path, default=HERE)
    args = parser.parse_args(argv)
    remember_programs(args.workdir)
    config = config_of(args)
    for seed in map(int, args.seeds):
        done = run_seed({**config, "seed": seed}, args.alphas, args.workdir)
        camvid_tables.publish([one.result for one in done], args.results)


def config_of(args) -> dict:
    """The config as plain settings, of other sizes where they are given.

    The central row has as many epochs as the others in all rounds.
    """
    config = runs.config_of(CONFIG, args.rounds)
    federation = config["federation"]
    epochs = federation["rounds"] * federation["local_epochs"]
    rows = {**config["methods"]}
    rows[CENTRAL] = {**rows[CENTRAL], "epochs": epochs}
    config["methods"] = {name: rows[name] for name in args.methods or rows}
    if args.image_size:
        size = [int(side) for side in args.image_size]
        config["data"] = {**config["data"], "image_size": size}
    return config


def run_seed(config: dict, alphas: list[float], workdir: pathlib.Path) -> list[Done]:
    """The central row, which no split changes, and the others.

    Features of the others are compared with the central ones.
    """
    folder = workdir / f"seed{config['seed']}"
    is_asked = CENTRAL in config["methods"]
    done = [one_run(config, CENTRAL, folder)] if is_asked else []
    reference = done[0].network if done else None
    for alpha in alphas:
        split = {**config, "partition": {**config["partition"], "alpha": alpha}}
        for method in config["methods"]:
            if method != CENTRAL:
                place = folder / f"alpha{alpha:g}"
                done.append(one_run(split, method, place, reference))
                print(camvid_tables.line(done[-1].result), flush=True)
    return done


def one_run(config: dict, method: str, folder: pathlib.Path, reference=None) -> Done:
    """Train a row, or read its end, and judge it.

    Args:
      reference: variables of the network that features are compared with, or None.

    Raises:
      ValueError: when the folder holds a row of another config.
    """
    config = {**config, "methods": {method: config["methods"][method]}}
    runs.check_settings(folder / f"{method}.json", config)
    facts = {"method": method, "seed": config["seed"]}
    if method != CENTRAL:
        facts["alpha"] = config["partition"]["alpha"]
    experiment = runs.built(config)
    if method != CENTRAL:
        experiment = with_features(experiment, config, reference)
    try:
        end = runs.stamped(lambda: trained(experiment, method, folder))
    except FloatingPointError as error:
        return Done({**facts, "diverged": str(error)})
    found = end["found"]
    for name in ("generic", "personalized"):
        facts[name] = found[name].metrics.get("mIoU")
    if method in SEVERAL:
        facts["generic"] = None
    if method != CENTRAL:
        judged = "personalized" if facts["generic"] is None else "generic"
        facts |= curves_of(folder / method, f"{judged}/mIoU")
    facts |= stamp_of(folder / f"{method}.made.json", end)
    return Done(facts, end["network"])


def trained(experiment, method: str, folder: pathlib.Path) -> dict:
    """The network of a row, trained or read, and what its evaluators found."""
    from fedfr_jax.runs.stages import run_stage

    trainer, place = experiment.stages[method].trainer, folder / method
    network, found = run_stage(experiment, trainer, None, place)
    return {"network": network, "found": found}


def curves_of(folder: pathlib.Path, metric: str) -> dict:
    """Metrics of the rounds that were judged; the last one's attention and loss."""
    from fedfr_jax.runs.sinks import read_jsonl

    lines = read_jsonl(folder / "metrics.jsonl")
    judged = [row for row in lines if metric in row]
    features = {name: f"representation/{name}" for name in camvid_tables.FEATURES}
    return {
        "curve": [row[metric] for row in judged],
        "rounds": [row["round"] for row in judged],
        "attention_entropy": lines[-1].get("attention_entropy"),
        "loss": lines[-1]["loss"],
        **{
            name: [row[key] for row in judged]
            for name, key in features.items()
            if all(key in row for row in judged)
        },
    }


def stamp_of(path: pathlib.Path, found: dict) -> dict:
    """Commit and cost of when the row was trained, not of when it is judged again."""
    if not path.exists():
        path.write_text(json.dumps({name: found[name] for name in ("made", "cost")}))
    return json.loads(path.read_text())


def with_features(experiment, config: dict, reference):
    """The experiment, whose network's features of test images are judged."""
    from fedfr_jax.data.augment import normalize
    from fedfr_jax.data.batching import Batching
    from fedfr_jax.tasks.evaluators import representation

    model, table = looked_at(config)
    given = model, table, experiment.mesh, Batching(8, normalize())
    judged = representation(*given, reference=reference)
    return runs.with_evaluator(experiment, "representation", judged)


def looked_at(config: dict) -> tuple:
    """The network, and all test images whatever the split."""
    import numpy as np

    from fedfr_jax.config.build import parse
    from fedfr_jax.tasks.data import open_data
    from fedfr_jax.tasks.segmentation import build_segmenter, with_masks

    parsed = parse(config)
    source = open_data(parsed.data)
    rows = np.flatnonzero(source.is_test)
    network, num_classes = parsed.model.network, len(source.masks.class_names)
    model = build_segmenter(network, source.input_shape, num_classes)
    return model, with_masks(source, rows, None)


if __name__ == "__main__":
    use_every_core()
    main(sys.argv[1:])
