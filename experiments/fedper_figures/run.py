"""FedPer's figures 2 to 6 in small: every case and seed, tables, findings and plots.

    python experiments/fedper_figures/run.py --config=configs/fedper/figures.py \
        --workdir=runs/fedper_figures [--seeds=0,1,2] [--cases=cifar10 resnet k=4,...]

Goes on where it was stopped. Writes results.json (every row of every case and seed),
the part of README.md between markers and the plots, beside this file or under
--results.
"""

import json
import os
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE), str(HERE.parent / "fedfr_tables")]

import cases  # noqa: E402
import figure_plots  # noqa: E402
import findings  # noqa: E402
from orderings import provenance, write_between, write_results  # noqa: E402

from fedfr_jax.commands.flags import (  # noqa: E402
    define,
    names,
    new_parser,
    parse,
    workdir,
)
from fedfr_jax.processes import use_every_core  # noqa: E402


def main(argv: list[str]) -> None:
    """Play what is missing, and write down what there is after every case."""
    parser = new_parser("run.py", __doc__)
    define(parser)
    parser.add_argument("--seeds", type=names, default=["0", "1", "2"])
    parser.add_argument("--cases", type=names, default=list(cases.CASES))
    parser.add_argument("--results", type=pathlib.Path, default=HERE)
    values = parse(parser, argv)
    folder = workdir(values, "run.py")
    for case in values.cases:
        if case not in cases.CASES:
            raise ValueError(f"--cases must be of {list(cases.CASES)}, got {case!r}.")
    remember_programs(folder)
    values.results.mkdir(parents=True, exist_ok=True)
    for seed in map(int, values.seeds):
        for case in values.cases:
            rows = run_case(values.config, case, seed, folder)
            publish(values.results, case, {str(seed): rows})


def publish(target: pathlib.Path, case: str, runs: dict) -> None:
    """Add {seed: rows} of a case to results.json; tables and plots anew."""
    write_results(target / "results.json", case, runs)
    results = findings.read(target / "results.json")
    write_between(target / "README.md", "results", findings.text(results))
    figure_plots.draw(results, target)


def remember_programs(folder: pathlib.Path) -> None:
    """Keep compiled programs beside the run: all seeds need the same ones."""
    place = str((folder / "compiled").resolve())
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", place)


def run_case(config, case: str, seed: int, folder: pathlib.Path) -> dict:
    """{row: what `run_one` returns} of one case and seed, each kept once done."""
    from fedfr_jax.build import build
    from fedfr_jax.runs.workdir import claim

    config = cases.config_of(config, case, seed)
    place = folder / case.replace(" ", "_") / f"seed{seed}"
    settings = cases.settings_of(config)
    with claim(place, config.to_json_best_effort(indent=1)):
        path = place / "rows.json"
        rows = json.loads(path.read_text()) if path.exists() else {}
        missing = [name for name in settings if name not in rows]
        if missing:
            experiment = build(config)
            for name in missing:
                rows[name] = run_one(experiment, place, name, settings[name])
                path.write_text(json.dumps(rows, indent=1))
                seconds = rows[name]["cost"]["seconds"]
                print(f"{case}, seed {seed}, {name}: {seconds:.0f} s", flush=True)
    return {name: rows[name] for name in settings}


def run_one(experiment, folder: pathlib.Path, name: str, settings: dict) -> dict:
    """Train and judge one row, or go on with it."""
    from fedfr_jax.runs.experiment import run_stages
    from fedfr_jax.runs.sinks import read_jsonl

    begun, used = time.perf_counter(), time.process_time()
    alone = experiment._replace(stages={name: experiment.stages[name]})
    found = run_stages(alone, folder)[name]
    curve = "personalised/accuracy"
    lines = read_jsonl(folder / name / "metrics.jsonl")
    return {
        "made": provenance(),
        "settings": settings,
        "generic": dict(found["generic"].metrics),
        "personalised": dict(found["personalised"].metrics),
        "of_client": found["personalised"].per_client["accuracy"].tolist(),
        "of_round": [line[curve] for line in lines if curve in line],
        "cost": {
            "seconds": round(time.perf_counter() - begun, 1),
            "core_seconds": round(time.process_time() - used, 1),
        },
    }


if __name__ == "__main__":
    use_every_core()
    main(sys.argv[1:])
