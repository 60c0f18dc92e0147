"""FedFR's tables 1 and 2 in small: every row, some seeds, mean and deviation.

    python experiments/fedfr_tables/run.py --config=configs/fedfr/table_omniglot.py \
        --workdir=runs/table_omniglot [--seeds=0,1,2] [--rows=pretrained,fedavg,...]
        [--name=omniglot]

Goes on where it was stopped. Writes the data set's part of results.json (every metric
of every row and seed) and of RESULTS.md, both beside this file or under --results; the
part is called as the config, or --name.
"""

import contextlib
import json
import pathlib
import shutil
import sys
import time

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = map(str, (HERE.parent.parent, HERE.parent, HERE))

from orderings import (  # noqa: E402
    above,
    claims,
    in_order,
    made,
    provenance,
    rows_of_all,
    table,
    write_between,
    write_results,
)
from studies import claim_config, remember_programs  # noqa: E402

from fedfr_jax.cli.flags import define, names, new_parser, parse, workdir  # noqa: E402
from fedfr_jax.distributed import use_every_core  # noqa: E402

# Rows that go on from another row's last round, which is trained once.
ADAPTED = {"finetune": "contrastive", "distill": "contrastive"}


def main(argv: list[str]) -> None:
    """Run every seed, then write results and table."""
    parser = new_parser("run.py", __doc__)
    define(parser)
    parser.add_argument("--seeds", type=names, default=["0", "1", "2"])
    parser.add_argument("--rows", type=names, default=[], help="default all")
    parser.add_argument("--name", default="", help="default the config's")
    parser.add_argument("--results", type=pathlib.Path, default=HERE)
    values = parse(parser, argv)
    folder, config = workdir(values.workdir), values.config
    remember_programs(folder)
    rows = values.rows or in_order(["pretrained", *config.methods])
    runs = {}
    for seed in map(int, values.seeds):
        place = folder / f"seed{seed}"
        runs[str(seed)] = run_seed(config, seed, place, rows)
        publish(runs, values.name or name_of(argv), values.results)


def publish(runs: dict, name: str, target: pathlib.Path) -> None:
    """Write and print what the seeds so far say."""
    runs = write_results(target / "results.json", name, runs)
    parts = [table(runs), claims(runs)]
    if "fedfr" in rows_of_all(runs):
        parts.append(above(runs))
    text = "\n\n".join(parts)
    write_between(target / "RESULTS.md", name, f"{made(runs)}\n\n{text}")
    print(text, flush=True)


def name_of(argv: list[str]) -> str:
    """A table's name, from its config file's."""
    file = next(w.partition("=")[2] for w in argv if w.startswith("--config="))
    return pathlib.Path(file).stem.removeprefix("table_")


def seeded(config, seed: int):
    """The config with `seed`, and with what refers to it."""
    with config.unlocked():
        config.seed = seed
    return config.copy_and_resolve_references()


def run_seed(config, seed: int, folder: pathlib.Path, names: list[str]) -> dict:
    """{row: what `run_one` returns} of one seed, each kept once done.

    The folder may hold rows of other tables; all but their own settings is the same.
    """
    from fedfr_jax.config.build import build

    config = seeded(config, seed)
    text = config.to_json_best_effort(indent=1)
    settings = {"pretrained": None, **json.loads(text)["methods"]}
    with claim_config(folder, text, but_for="methods"):
        path = folder / "rows.json"
        rows = json.loads(path.read_text()) if path.exists() else {}
        for name in names:
            if rows.get(name, {}).get("settings") not in (None, settings[name]):
                raise ValueError(
                    f"{path}: the settings of {name} must be those of this command, "
                    f"got {rows[name]['settings']}; take another --workdir."
                )
        missing = [name for name in names if name not in rows]
        if missing:
            experiment = build(config)
            for name in missing:
                rows[name] = run_one(experiment, folder, name, settings[name])
                path.write_text(json.dumps(rows, indent=1))
                seconds = rows[name]["cost"]["seconds"]
                print(f"seed {seed}, {name}: {seconds:.0f} s", flush=True)
    return {name: rows[name] for name in names}


def run_one(experiment, folder: pathlib.Path, name: str, settings) -> dict:
    """Train and judge one row, or go on with it."""
    from fedfr_jax.runs.experiment import run_stages

    begun, used = time.perf_counter(), time.process_time()
    names = list(dict.fromkeys(["pretrained", name]))
    stages = {name: experiment.stages[name] for name in names}
    with contextlib.ExitStack() as stack:
        if name != "pretrained":
            go_on_from(folder, name)
            held = claim_config(folder / name, json.dumps({"settings": settings}))
            stack.enter_context(held)
        found = run_stages(experiment._replace(stages=stages), folder)[name]
    generic, personalized = found["generic"], found["personalized"]
    return {
        "made": provenance(),
        "settings": settings,
        "generic": generic.metrics,
        "personalized": personalized.metrics,
        "of_client": {k: v.tolist() for k, v in personalized.per_client.items()},
        "roc": [np.asarray(x).tolist() for x in generic.curves["roc"]],
        "cost": {
            "seconds": round(time.perf_counter() - begun, 1),
            "core_seconds": round(time.process_time() - used, 1),
            **work(experiment, stages[name].trainer, folder / name),
        },
    }


def go_on_from(folder: pathlib.Path, name: str) -> None:
    """Give an adapted row the rounds that another row has played already."""
    source = folder / ADAPTED.get(name, name)
    if source.exists() and not (folder / name).exists():
        draft = folder / f"{name}.part"
        shutil.rmtree(draft, ignore_errors=True)  # of a copy that was interrupted
        shutil.copytree(source, draft, ignore=shutil.ignore_patterns("config.json"))
        draft.rename(folder / name)


def work(experiment, trainer, folder: pathlib.Path) -> dict:
    """What a row trains on: the images of a client and round, and its steps in all.

    Central training stands there as one client. With `chosen` of a federated row.
    """
    from fedfr_jax.runs.sinks import read_parts

    if not (folder / "clients.jsonl").exists():
        batch, images = trainer.settings.batch_size, trainer.num_rows
        steps = trainer.settings.epochs * -(-images // batch)
        return {"images": images, "steps": steps}
    found = chosen(folder)
    own = np.diff(experiment.task.population.offsets).mean()
    lines = [*read_parts(folder / "clients.jsonl")]
    return {
        "images": float(own + found.get("hard_negatives", 0.0)),
        "steps": float(sum(np.mean(line["steps"]) for line in lines)),
        **found,
    }


def chosen(folder: pathlib.Path) -> dict:
    """Hard negatives of a row that has any.

    Returns:
      hard_negatives: mean over clients and rounds; of_round: mean of each round [R];
      of_client: mean over rounds of each client [N].
    """
    from fedfr_jax.runs.sinks import read_parts

    path = folder / "clients.jsonl"
    lines = [*read_parts(path)] if path.exists() else []
    added = lambda line: line.get("added_examples", line.get("hard_negatives"))
    lines = [x for x in lines if any(added(x))]
    if not lines:
        return {}
    order = [np.argsort(x["client"]) for x in lines]
    numbers = [np.array(added(x))[i] for x, i in zip(lines, order, strict=True)]
    numbers = np.array(numbers, np.float64)  # [R, N]
    return {
        "hard_negatives": float(numbers.mean()),
        "of_round": numbers.mean(axis=1).round(1).tolist(),
        "of_client": numbers.mean(axis=0).round(1).tolist(),
    }


if __name__ == "__main__":
    use_every_core()
    main(sys.argv[1:])
