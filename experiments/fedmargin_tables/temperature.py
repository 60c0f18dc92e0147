"""FedMargin's temperature, chosen on users that no round sees.

    python experiments/fedmargin_tables/temperature.py --workdir=runs/fedmargin_temperature

A fifth of the users is left out of the federation, others for each seed; accuracy is
that of the global model on their training images, mean of the last five rounds. Half of
a cohort straggles. Test images are not looked at. Goes on where it was stopped; writes
temperature.json and its table of README.md.
"""

import argparse
import json
import pathlib
import sys
from statistics import mean, stdev

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

import run  # noqa: E402
import tables  # noqa: E402
from orderings import p_value, write_between  # noqa: E402

TEMPERATURES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
VALIDATION_USERS = {"synthetic": 6, "mnist1000": 200}  # a fifth
LAST = 5  # rounds, of whose accuracy the mean is taken


def main(argv: list[str]) -> None:
    """Run what is missing, then write results and table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--results", type=pathlib.Path, default=HERE)
    args = parser.parse_args(argv)
    run.remember_programs(args.workdir)
    found = {name: {} for name in VALIDATION_USERS}
    for seed in range(args.seeds):
        for name in VALIDATION_USERS:
            folder = args.workdir / name / f"seed{seed}"
            found[name][seed] = run_seed(name, seed, folder)
    path = args.results / "temperature.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    write_between(args.results / "README.md", "temperature", table(found))


def run_seed(name: str, seed: int, folder: pathlib.Path) -> dict:
    """{row: result} of a seed: both means without attention, then each temperature."""
    config = run.config_of(run.SETS[name], 0)
    users = {"seed": seed, "unseen_clients": VALIDATION_USERS[name]}
    config = {**config, "seed": seed, "partition": {**config["partition"], **users}}
    config = run.with_federation(config, straggler_fraction=0.5)
    rows = {row: config["methods"][row] for row in ("fedavg", "fairavg")}
    for temperature in TEMPERATURES:
        algorithm = {"name": "fedmargin", "temperature": temperature}
        row = {**config["methods"]["fedmargin"], "algorithm": algorithm}
        rows[f"T = {temperature:g}"] = row
    found = {}
    for row, method in rows.items():
        path = folder / f"{row.replace(' ', '')}.json"
        if not path.exists():
            one = {**config, "methods": {row: method}}
            result = run.stamped(lambda one=one, row=row: play(one, row, folder))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result))
        found[row] = json.loads(path.read_text())
        print(name, seed, row, found[row], flush=True)
    return found


def play(config: dict, row: str, folder: pathlib.Path) -> dict:
    """Accuracy on the validation users, and the attention's mean entropy in nats."""
    experiment = with_validation_users(run.built(config), config)
    _, lines = run.trained(experiment, row, folder)
    entropy = [line["attention_entropy"] for line in lines if "lpm" in line]
    return {
        "accuracy": mean(line["validation/accuracy"] for line in lines[-LAST:]),
        "entropy": mean(entropy) if entropy else None,
    }


def with_validation_users(experiment, config: dict):
    """The experiment, whose model meets the training images of the users left out."""
    from fedfr_jax.tasks.classification.evaluators import split_clients
    from fedfr_jax.tasks.data import build_dataset, open_data
    from fedfr_jax.tasks.evaluators import build_feature_fn
    from fedfr_jax.types import Evaluation, Evaluator

    source = open_data(config["data"])
    _, left_out = split_clients(config["partition"], source)
    images = build_dataset(source, left_out.train, None)
    model, feed = run.seen(config, source)
    look = build_feature_fn(model, images, experiment.mesh, feed, max_features=5000)

    def evaluate(networks):
        labels, _, logits = look(networks.variables)
        return Evaluation({"accuracy": float((logits.argmax(-1) == labels).mean())})

    experiment = experiment._replace(task=experiment.task._replace(evaluators={}))
    return run.with_evaluator(experiment, "validation", Evaluator(evaluate))


def table(found: dict) -> str:
    """Markdown: a line per row; accuracy, entropy and p against FairAvg of each set."""
    heads, rows = ["row"], next(iter(found["synthetic"].values()))
    for name in found:
        heads += [f"{name}, %", "entropy, nats", "beside fairavg, points"]
    lines = []
    for row in rows:
        cells = [row]
        for seeds in found.values():
            accuracy = [100 * seed[row]["accuracy"] for seed in seeds.values()]
            even = [100 * seed["fairavg"]["accuracy"] for seed in seeds.values()]
            entropy = [seed[row]["entropy"] for seed in seeds.values()]
            gains = np.array(accuracy) - np.array(even)
            cells.append(f"{mean(accuracy):.1f} +- {stdev(accuracy):.1f}")
            cells.append("-" if None in entropy else f"{mean(entropy):.3f}")
            is_even = row == "fairavg"
            cells.append(
                "-" if is_even else f"{mean(gains):+.1f}, p {p_value(gains):.2f}"
            )
        lines.append(cells)
    return tables.grid(heads, lines)


if __name__ == "__main__":
    main(sys.argv[1:])
