"""Experiments of several cases and seeds, played row by row and gone on with.

A row that is done is kept in rows.json of its case and seed. `results.json` and the
part of RESULTS.md between its markers are written anew after every case.
"""

import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import NamedTuple

from orderings import provenance, write_between, write_results

from fedfr_jax.cli.flags import define, names, new_parser, parse, workdir


class Study(NamedTuple):
    """What an experiment plays, what it keeps and how it tells it.

    Results are {case: {seed: {row: what is kept}}}, in the order of `cases`.
    """

    folder: pathlib.Path  # of the experiment
    cases: dict[str, tuple[str, ...]]  # {case: its rows}
    config_of: Callable  # (config, case, seed) -> the case's config
    kept: Callable  # (experiment, {evaluator: Evaluation}, row's folder) -> dict
    text: Callable  # results -> Markdown
    # (case's config, case, its folder) -> config, after what it needs is made
    prepare: Callable = lambda config, case, folder: config


def main(study: Study, doc: str, argv: list[str]) -> None:
    """Play what is missing, and write down what there is after every case."""
    parser = new_parser("run.py", doc)
    define(parser)
    parser.add_argument("--seeds", type=names, default=["0", "1", "2"])
    parser.add_argument("--cases", type=names, default=list(study.cases))
    parser.add_argument("--results", type=pathlib.Path, default=study.folder)
    values = parse(parser, argv)
    folder = workdir(values.workdir)
    for case in values.cases:
        if case not in study.cases:
            raise ValueError(f"--cases must be of {list(study.cases)}, got {case!r}.")
    remember_programs(folder)
    for seed in map(int, values.seeds):
        for case in values.cases:
            rows = run_case(study, values.config, case, seed, folder)
            publish(study, values.results, case, {str(seed): rows})


def remember_programs(folder: pathlib.Path) -> None:
    """Keep compiled programs beside the run: all seeds need the same ones."""
    place = str((folder / "compiled").resolve())
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", place)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


def run_case(study: Study, config, case: str, seed: int, folder: pathlib.Path) -> dict:
    """{row: what `run_one` returns} of one case and seed, each kept once done."""
    from fedfr_jax.config.build import build

    config = study.config_of(config, case, seed)
    place = folder / case.replace(" ", "_") / f"seed{seed}"
    settings = json.loads(config.to_json_best_effort())["methods"]
    with claim_config(place, config.to_json_best_effort(indent=1)):
        config = study.prepare(config, case, place)
        path = place / "rows.json"
        rows = json.loads(path.read_text()) if path.exists() else {}
        missing = [name for name in settings if name not in rows]
        experiment = build(config) if missing else None
        for name in missing:
            row = run_one(study, experiment, place, name)
            rows[name] = {**row, "settings": settings[name]}
            path.write_text(json.dumps(rows, indent=1))
            seconds = rows[name]["cost"]["seconds"]
            print(f"{case}, seed {seed}, {name}: {seconds:.0f} s", flush=True)
    return {name: rows[name] for name in settings}


def claim_config(folder: pathlib.Path, text: str, but_for: str = ""):
    """Lock a folder for the config `text`; another than before is refused."""
    from fedfr_jax.runs.workdir import check_config, claim

    if (folder / "config.json").exists():
        check_config(folder, json.loads(text), but_for)
    return claim(folder, text, {})


def run_one(study: Study, experiment, folder: pathlib.Path, name: str) -> dict:
    """Train and judge one row, or go on with it."""
    from fedfr_jax.runs.experiment import run_stages

    begun, used = time.perf_counter(), time.process_time()
    alone = experiment._replace(stages={name: experiment.stages[name]})
    found = run_stages(alone, folder)[name]
    return {
        "made": provenance(),
        **study.kept(experiment, found, folder / name),
        "cost": {
            "seconds": round(time.perf_counter() - begun, 1),
            "core_seconds": round(time.process_time() - used, 1),
        },
    }


def publish(study: Study, target: pathlib.Path, case: str, runs: dict) -> None:
    """Add {seed: rows} of a case to results.json; tables anew."""
    write_results(target / "results.json", case, runs)
    found = json.loads((target / "results.json").read_text())
    results = {x: found[x]["seeds"] for x in study.cases if x in found}
    write_between(target / "RESULTS.md", "results", study.text(results))
