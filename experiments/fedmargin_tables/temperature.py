"""FedMargin's temperature, chosen on validation users and validation images.

    python experiments/fedmargin_tables/temperature.py --workdir=runs/temperature

A fifth of the users is left out of the federation, and a fifth of the other users'
training images, others for each seed. The global model is evaluated on both, mean of
the last five rounds; test images are not looked at. Half of a cohort straggles. Goes on
where it was stopped; writes temperature.json and the table of TEMPERATURE.md.
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
SETS = ("synthetic", "mnist1000")
EVERY = 5  # one of so many users, and of the others' training images, is left out
LAST = 5  # rounds, of whose accuracy the mean is taken
MEASURES = {"images": "images of known users", "users": "new users"}


def main(argv: list[str]) -> None:
    """Run what is missing, then write results and table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--results", type=pathlib.Path, default=HERE)
    args = parser.parse_args(argv)
    run.remember_programs(args.workdir)
    found = {name: {} for name in SETS}
    for seed in range(args.seeds):
        for name in SETS:
            folder = args.workdir / name / f"seed{seed}"
            found[name][seed] = run_seed(name, seed, folder)
    path = args.results / "temperature.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    write_between(args.results / "TEMPERATURE.md", "temperature", table(found))


def run_seed(name: str, seed: int, folder: pathlib.Path) -> dict:
    """{row: result} of a seed: both means without attention, then each temperature."""
    config = {**run.config_of(run.SETS[name], 0), "seed": seed}
    config = run.with_federation(config, straggler_fraction=0.5)
    rows = {row: config["methods"][row] for row in ("fedavg", "fairavg")}
    for temperature in TEMPERATURES:
        algorithm = {"name": "fedmargin", "temperature": temperature}
        row = {**config["methods"]["fedmargin"], "algorithm": algorithm}
        rows[f"T={temperature:g}"] = row
    found = {}
    for row, method in rows.items():
        path = folder / f"{row}.json"
        if not path.exists():
            one = {**config, "methods": {"row": method}}
            result = run.stamped(lambda one=one, row=row: play(one, folder / row))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result))
        found[row] = json.loads(path.read_text())
        print(name, seed, row, found[row], flush=True)
    return found


def play(config: dict, folder: pathlib.Path) -> dict:
    """Accuracies on what is left out, and the attention's mean entropy in nats."""
    experiment = with_validation(run.built(config), config)
    _, lines = run.trained(experiment, "row", folder)
    entropy = [line["attention_entropy"] for line in lines if "lpm" in line]
    last = lines[-LAST:]
    accuracy = {key: mean(line[f"{key}/accuracy"] for line in last) for key in MEASURES}
    return {**accuracy, "entropy": mean(entropy) if entropy else None}


def with_validation(experiment, config: dict):
    """The experiment without the images left out, by which its model is evaluated."""
    from fedfr_jax.tasks.data import build_dataset, open_data, split
    from fedfr_jax.tasks.evaluators import build_feature_fn
    from fedfr_jax.types import Evaluation, Evaluator

    source = open_data(config["data"])
    parts = split(config["partition"], source)
    kept, left_out = leave_out(parts.train, parts.train_offsets, config["seed"])
    population = experiment.task.population
    offsets = np.cumsum([0, *map(len, kept)])
    population = population._replace(
        offsets=offsets, num_classes=population.num_classes[: len(kept)]
    )
    data = build_dataset(source, np.concatenate(kept), None)
    model, feed = run.seen(config, source)

    def evaluator(rows):
        images = build_dataset(source, rows, None)
        look = build_feature_fn(model, images, experiment.mesh, feed, max_features=5000)

        def evaluate(networks):
            labels, _, logits = look(networks.variables)
            return Evaluation({"accuracy": float((logits.argmax(-1) == labels).mean())})

        return Evaluator(evaluate)

    evaluators = {key: evaluator(rows) for key, rows in left_out.items()}
    task = experiment.task._replace(
        dataset=data, population=population, evaluators=evaluators
    )
    return experiment._replace(task=task)


def leave_out(rows: np.ndarray, offsets: np.ndarray, seed: int) -> tuple:
    """([rows of each user that stays], {measure: rows}) of users' rows by offsets."""
    rng = np.random.default_rng(seed)
    users = [rng.permutation(own) for own in np.split(rows, offsets[1:-1])]
    order = rng.permutation(len(users))
    new, known = np.split(order, [len(users) // EVERY])
    cuts = [len(users[i]) // EVERY for i in np.sort(known)]
    pairs = [np.split(users[i], [n]) for i, n in zip(np.sort(known), cuts, strict=True)]
    left_out = {
        "images": np.concatenate([out for out, _ in pairs]),
        "users": np.concatenate([users[i] for i in new]),
    }
    return [stays for _, stays in pairs], left_out


def table(found: dict) -> str:
    """Markdown: a line per row; of each set entropy, accuracies, gain over FairAvg."""
    heads, rows = ["row"], next(iter(found["synthetic"].values()))
    for name in found:
        heads.append(f"{name}: entropy")
        heads += [f"{name}: {text}, %" for text in MEASURES.values()]
    lines = []
    for row in rows:
        cells = [row]
        for seeds in found.values():
            entropy = [seed[row]["entropy"] for seed in seeds.values()]
            cells.append("-" if None in entropy else f"{mean(entropy):.3f}")
            cells += [accuracy_cell(seeds, row, key) for key in MEASURES]
        lines.append(cells)
    return tables.grid(heads, lines)


def accuracy_cell(seeds: dict, row: str, key: str) -> str:
    """Mean and deviation over seeds, and the gain over FairAvg with its p."""
    accuracy = np.array([100 * seed[row][key] for seed in seeds.values()])
    text = f"{mean(accuracy):.1f} +- {stdev(accuracy):.1f}"
    gain = accuracy - [100 * seed["fairavg"][key] for seed in seeds.values()]
    return f"{text} ({gain.mean():+.1f}, p {p_value(gain):.2f})" if gain.any() else text


if __name__ == "__main__":
    main(sys.argv[1:])
