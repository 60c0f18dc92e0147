"""The study of the threshold t_HN: how many hard negatives, what they cost and bring.

    python experiments/fedfr_tables/thresholds.py --workdir=runs/table_omniglot \
        --config=configs/fedfr/table_omniglot.py [--thresholds=0.3,...] [--seeds=0]

Counts what every threshold selects with the pretrained network, and trains the FedFR
row, without a cap on the number, at those that select at most --most images a client.
Writes thresholds_<name>.png beside the table. Judged on a validation split, so that no
choice sees the images that the tables are judged on; --no-validation judges as they do,
and shares the pretrained network with the table's run in the same --workdir.
"""

import pathlib
import sys

import numpy as np
from orderings import (
    core_seconds,
    made,
    mean_rate,
    table,
    write_between,
    write_results,
)
from run import (
    judged,
    name_of,
    remember_programs,
    run_seed,
    seeded,
    study_parser,
    use_every_core,
)

from fedfr_jax.cli.flags import names, parse


def main(argv: list[str]) -> None:
    """Count, run the thresholds of every seed, write results, table and plot."""
    parser = study_parser("thresholds.py", __doc__)
    grid = ["0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9"]
    parser.add_argument("--thresholds", type=names, default=grid, help="cosines")
    parser.add_argument("--most", type=int, default=600, help="images to train on")
    values = parse(parser, argv)
    folder, config = judged(values, "thresholds.py")
    remember_programs(folder)
    grid, seeds = values.thresholds, [int(s) for s in values.seeds]
    counts = np.mean([count(config, s, folder / f"seed{s}", grid) for s in seeds], 0)
    counted = dict(zip(grid, counts.tolist(), strict=True))
    print(counts_table(counted), flush=True)
    rows = [
        name_at(t)
        for t, number in zip(grid, counts, strict=True)
        if number <= values.most
    ]
    config = at_thresholds(config, grid)
    runs = {
        str(s): run_seed(config, s, folder / f"seed{s}", ["pretrained", *rows])
        for s in seeds
    }
    target, name = values.results, name_of(argv)
    write_results(target / "results.json", f"{name} thresholds", runs, counted=counted)
    plot(target / f"thresholds_{name}.png", counted, runs)
    text = f"{made(runs)}\n\n{counts_table(counted)}\n\n{table(runs)}"
    write_between(target / "RESULTS.md", f"{name} thresholds", text)
    print(text)


def name_at(threshold: str) -> str:
    """Name of a row, in hundredths; a config's keys hold no dots.

    >>> name_at("0.7"), name_at("0.575")
    ('t_HN=70', 't_HN=57_5')
    """
    return f"t_HN={100 * float(threshold):g}".replace(".", "_")


def threshold_of(name: str) -> float:
    """The threshold of a row.

    >>> threshold_of("t_HN=57_5")
    0.575
    """
    return float(name.partition("=")[2].replace("_", ".")) / 100


def at_thresholds(config, grid: list[str]):
    """The config with the FedFR row at every threshold, and no other."""
    config = config.copy_and_resolve_references()
    own = config.methods.fedfr.to_dict()
    with config.unlocked():
        config.methods = {
            name_at(t): {
                **own,
                "algorithm": {
                    **own["algorithm"],
                    "hard_negative_threshold": float(t),
                    "max_hard_negatives": 0,
                },
            }
            for t in grid
        }
    return config


def count(config, seed: int, folder: pathlib.Path, grid: list[str]) -> np.ndarray:
    """Mean number of public images that each threshold gives a client, [T]."""
    import jax

    from fedfr_jax.config.build import build
    from fedfr_jax.data.augment import normalize
    from fedfr_jax.data.batching import Batching
    from fedfr_jax.federated.inference import build_embed
    from fedfr_jax.runs.central_stage import train_central
    from fedfr_jax.runs.workdir import claim
    from fedfr_jax.tasks.faces.frozen_features import max_similarity

    config = seeded(config, seed)
    text = config.to_json_best_effort(indent=1)
    with claim(folder, text, but_for="methods"):
        experiment = build(config)
        trainer = experiment.stages["pretrained"].trainer
        place = folder / "pretrained"
        end = train_central(trainer, experiment.mesh, place, seed=seed)
        backbone = trainer.global_model(end)
    table, offsets = experiment.task.dataset, experiment.task.population.offsets
    embed = build_embed(
        trainer.apply_global, Batching(64, normalize()), experiment.mesh
    )
    rows = np.arange(table.num_examples, dtype=np.int32)
    features = embed(backbone, table, rows)[: len(rows), 0]
    own, public = features[: offsets[-1]], features[offsets[-1] :]
    nearest = jax.jit(lambda start, size: max_similarity(own, start, size, public))
    spans = zip(offsets[:-1], np.diff(offsets), strict=True)
    nearest = np.array([nearest(*span) for span in spans])  # [N, G]
    above = nearest[None] > np.array(grid, np.float32)[:, None, None]
    return above.sum(axis=2).mean(axis=1)


def counts_table(counted: dict[str, float]) -> str:
    """Markdown: images that a client gets before the first round."""
    lines = [
        "| t_HN | " + " | ".join(counted) + " |",
        "|---" * (len(counted) + 1) + "|",
    ]
    cells = [f"{number:.0f}" for number in counted.values()]
    return "\n".join([*lines, "| images of a client | " + " | ".join(cells) + " |"])


def plot(path: pathlib.Path, counted: dict[str, float], runs: dict) -> None:
    """Count, cost and both evaluators' mean rates over the threshold."""
    from matplotlib.figure import Figure

    names = [name for name in next(iter(runs.values())) if name.startswith("t_HN")]
    trained = [threshold_of(name) for name in names]
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    number, cost, rate = figure.subplots(1, 3)
    number.plot([float(t) for t in counted], counted.values(), "o-", color="#0072B2")
    number.set(yscale="symlog", ylim=(0, None), title="hard negatives of a client")
    seconds = [core_seconds(runs, name) for name in names]
    cost.plot(trained, seconds, "o-", color="#D55E00")
    cost.set(ylim=(0, None), title="core seconds of the row")
    colors = {"generic": "#009E73", "personalized": "#CC79A7"}
    for evaluator, color in colors.items():
        rates = [mean_rate(runs, name, evaluator).mean() for name in names]
        rate.plot(trained, rates, "o-", color=color, label=f"{evaluator}, FedFR")
        start = mean_rate(runs, "pretrained", evaluator).mean()
        rate.axhline(start, color=color, linestyle=":", label=f"{evaluator}, start")
    rate.set(title="mean of the rates")
    figure.legend(loc="outside right center")
    for axes in figure.axes:
        axes.set_xlabel("threshold t_HN")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    use_every_core()
    main(sys.argv[1:])
