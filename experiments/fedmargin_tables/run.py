"""FedMargin's table 1 and its figures in small: methods x stragglers x seeds.

    python experiments/fedmargin_tables/run.py --workdir=runs/fedmargin_tables \
        [--sets=synthetic,mnist,mnist1000,fashion] [--methods=...] [--seeds=0,1,2] \
        [--stragglers=0,0.5,0.8] [--rounds=R]

Goes on where it was stopped: a run that is done is a file. Writes results.json, the
table of README.md and a picture per set, beside this file or under --results. Another
set is a line of SETS.
"""

import argparse
import json
import pathlib
import runpy
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
ROOM = HERE.parent
sys.path[:0] = map(str, (ROOM.parent, ROOM, HERE, ROOM / "fedfr_tables"))

import tables  # noqa: E402
from orderings import provenance  # noqa: E402
from studies import remember_programs  # noqa: E402

from fedfr_jax.distributed import use_every_core  # noqa: E402

CENTRAL = "central"  # FedAvg of one client that owns everybody's images


class Set(NamedTuple):
    """A data set of the table."""

    config: str  # below configs/
    accuracy: str = "generic/accuracy"  # of a method with one network for everybody
    own_accuracy: str = "personalized/accuracy"  # of a method with several


SETS = {
    "synthetic": Set("fedmargin/table_synthetic.py"),
    "mnist": Set("fedmargin/table_mnist.py"),
    "mnist1000": Set("fedmargin/table_mnist1000.py"),
    "fashion": Set("fedmargin/table_fashion.py"),
}


def main(argv: list[str]) -> None:
    """Run what is missing, set by set, then write table and pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    words = lambda text: text.split(",")
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--sets", type=words, default=list(SETS))
    parser.add_argument("--methods", type=words, default=[], help="default all")
    parser.add_argument("--seeds", type=words, default=["0", "1", "2"])
    parser.add_argument("--stragglers", type=words, default=["0", "0.5", "0.8"])
    parser.add_argument("--rounds", type=int, default=0, help="default the config's")
    parser.add_argument("--results", type=pathlib.Path, default=HERE)
    args = parser.parse_args(argv)
    remember_programs(args.workdir)
    for name in args.sets:
        runs = run_set(name, args)
        tables.publish(name, runs, args.results)


def check_settings(path: pathlib.Path, config: dict) -> None:
    """Keep the config of a folder there, or check that it is this one.

    Raises:
      ValueError: when it is another.
    """
    text = json.dumps(config, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(text)
    if path.read_text() != text:
        raise ValueError(f"{path} must be of this config: take another --workdir.")


def run_set(name: str, args) -> list[dict]:
    """Results of every (method, stragglers, seed) of a set, the central one first."""
    config = config_of(SETS[name], args.rounds)
    methods = args.methods or list(config["methods"])
    found = []
    for seed in map(int, args.seeds):
        seeded = with_federation({**config, "seed": seed}, straggler_fraction=0.0)
        central = central_run(name, seeded, args.workdir / name / f"seed{seed}")
        found.append(central.result)
        for ratio in map(float, args.stragglers):
            straggling = with_federation(seeded, straggler_fraction=ratio)
            folder = args.workdir / name / f"seed{seed}" / f"stragglers{ratio:g}"
            for method in methods:
                run = one_run(name, straggling, method, folder, central.variables)
                found.append({"seed": seed, "stragglers": ratio, **run})
                print(tables.line(name, found[-1]), flush=True)
    return found


def config_of(of: Set, rounds: int) -> dict:
    """The set's config as plain settings."""
    from fedfr_jax.config.build import plain

    path = HERE.parent.parent / "configs" / of.config
    config = plain(runpy.run_path(str(path))["get_config"]())
    return with_federation(config, rounds=rounds) if rounds else config


def with_federation(config: dict, **changes) -> dict:
    """The config with other settings of its federation."""
    return {**config, "federation": {**config["federation"], **changes}}


class Central(NamedTuple):
    """The reference of a seed."""

    result: dict
    variables: object


def central_run(name: str, config: dict, folder: pathlib.Path) -> Central:
    """Train the reference for as many epochs as there are rounds, or read it."""
    rows = {CENTRAL: config["methods"]["fedavg"]}
    alone = with_federation({**config, "methods": rows}, cohort_size=1, local_epochs=1)
    experiment = built(alone)
    population = experiment.task.population
    whole = population._replace(
        offsets=population.offsets[[0, -1]], num_classes=population.num_classes[:1]
    )
    evaluators = {"generic": experiment.task.evaluators["generic"]}
    task = experiment.task._replace(population=whole, evaluators=evaluators)
    experiment = experiment._replace(task=task)
    variables, rows = trained(experiment, CENTRAL, folder)
    curve = [row[SETS[name].accuracy] for row in rows]
    result = {"method": CENTRAL, "seed": config["seed"], "accuracy": curve[-1]}
    result["loss"] = rows[-1]["loss"]
    return Central(result, variables)


def one_run(name, config, method, folder, reference) -> dict:
    """Curves of one method, trained or read; features are judged without stragglers."""
    path = folder / f"{method}.json"
    config = {**config, "methods": {method: config["methods"][method]}}
    settings = json.loads(json.dumps(config))
    if path.exists():
        kept = json.loads(path.read_text())
        if kept.pop("settings") != settings:
            raise ValueError(f"{path} must be of this config: take another --workdir.")
        return kept
    result = stamped(lambda: played(name, config, method, folder, reference))
    path.write_text(json.dumps({**result, "settings": settings}))
    return result


def stamped(play: Callable[[], dict]) -> dict:
    """What `play` returns, and of which commit it is and what it cost."""
    begun, used = time.perf_counter(), time.process_time()
    result = play()
    cost = {
        "seconds": round(time.perf_counter() - begun, 1),
        "core_seconds": round(time.process_time() - used, 1),
    }
    return {**result, "made": provenance(), "cost": cost}


def played(name, config, method, folder, reference) -> dict:
    """What `one_run` keeps of a method, or why it went no further."""
    experiment = built(config)
    if not config["federation"]["straggler_fraction"]:
        experiment = with_features(experiment, config, reference)
    if method not in tables.SEVERAL:
        experiment = with_loss(experiment, config)
    try:
        _, rows = trained(experiment, method, folder)
    except FloatingPointError as error:
        return {"method": method, "diverged": str(error)}
    own = method in tables.SEVERAL
    key = SETS[name].own_accuracy if own else SETS[name].accuracy
    result = {"method": method, "curve": [row[key] for row in rows]}
    result["loss"] = rows[-1].get("training/loss", rows[-1]["loss"])
    if (entropy := rows[-1].get("attention_entropy")) is not None:
        result["attention_entropy"] = entropy
    for metric in ("amm", "mmd"):
        if f"representation/{metric}" in rows[-1]:
            result[metric] = [row[f"representation/{metric}"] for row in rows]
    return result


def built(config: dict):
    """The experiment of a config."""
    from fedfr_jax.config.build import build

    return build(config)


def with_features(experiment, config: dict, reference):
    """The experiment, whose network's features are compared with the reference's."""
    from fedfr_jax.config.build import parse
    from fedfr_jax.tasks.data import build_dataset, open_data, split
    from fedfr_jax.tasks.evaluators import representation

    parsed = parse(config)
    source = open_data(parsed.data)
    parts = split(parsed.partition.partition, source)
    test = build_dataset(source, parts.test.rows, None)
    model, feed = seen(config, source)
    evaluator = representation(
        model, test, experiment.mesh, feed, reference=reference, max_images=500
    )
    return with_evaluator(experiment, "representation", evaluator)


def with_loss(experiment, config: dict):
    """The experiment, whose network's loss on training images is told after a round.

    The loss of local steps has terms of its own in FedProx and FedDANE.
    """
    from fedfr_jax.config.build import parse
    from fedfr_jax.tasks.data import open_data
    from fedfr_jax.tasks.evaluators import build_feature_fn
    from fedfr_jax.types import Evaluation, Evaluator

    model, feed = seen(config, open_data(parse(config).data))
    table, mesh = experiment.task.dataset, experiment.mesh
    look = build_feature_fn(model, table, mesh, feed, max_features=2000)

    def evaluate(networks):
        if networks.variables is None:
            return Evaluation()
        labels, _, logits = look(networks.variables)
        return Evaluation({"loss": mean_cross_entropy(logits, labels)})

    return with_evaluator(experiment, "training", Evaluator(evaluate))


def mean_cross_entropy(logits, labels) -> float:
    """Mean softmax cross-entropy of logits [n, M] to labels [n]."""
    import jax
    import optax

    losses = jax.jit(optax.softmax_cross_entropy_with_integer_labels)(logits, labels)
    return float(np.asarray(losses).mean())


def seen(config: dict, source) -> tuple:
    """The config's network, and how it sees test images."""
    from fedfr_jax.config.build import parse
    from fedfr_jax.data.augment import normalize
    from fedfr_jax.data.batching import Batching
    from fedfr_jax.tasks.classification import classifier

    is_images = len(source.input_shape) == 3
    feed = Batching(64, normalize() if is_images else None)
    model, shape = parse(config).model, source.input_shape
    return classifier(model.network, shape, len(source.names), model.projection), feed


def with_evaluator(experiment, name: str, evaluator):
    """The experiment with one more evaluator."""
    evaluators = {**experiment.task.evaluators, name: evaluator}
    return experiment._replace(task=experiment.task._replace(evaluators=evaluators))


def trained(experiment, name: str, folder: pathlib.Path) -> tuple:
    """(network or None, a line of metrics per round) of a stage."""
    from fedfr_jax.runs.sinks import read_jsonl
    from fedfr_jax.runs.stages import run_stage

    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    trainer = experiment.stages[name].trainer
    network, _ = run_stage(experiment, trainer, None, place)
    return network, read_jsonl(place / "metrics.jsonl")


if __name__ == "__main__":
    use_every_core()
    main(sys.argv[1:])
