"""FedReID's tables in small: every case and seed, tables, claims and plots.

    python experiments/fedreid_tables/run.py --config=configs/fedreid/tables.py \
        --workdir=runs/fedreid_tables [--seeds=0,1,2] [--cases=by_camera,...]

Goes on where it was stopped: a row that is done is a file. Writes results.json (every
row of every case and seed), the part of README.md between markers and the plots, beside
this file or under --results.
"""

import json
import os
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE), str(HERE.parent / "fedfr_tables")]

import market_parts  # noqa: E402
import reid_cases as cases  # noqa: E402
import reid_findings  # noqa: E402
import reid_measures  # noqa: E402
import reid_plots as plots  # noqa: E402
from orderings import provenance, write_between, write_results  # noqa: E402

from fedfr_jax.commands.flags import (  # noqa: E402
    define,
    names,
    new_parser,
    parse,
    workdir,
)
from fedfr_jax.processes import use_every_core  # noqa: E402

PROTOCOLS = ("generic", "personalised", "local")


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
    know_parts()
    values.results.mkdir(parents=True, exist_ok=True)
    for seed in map(int, values.seeds):
        for case in values.cases:
            rows = run_case(values.config, case, seed, folder)
            publish(values.results, case, {str(seed): rows})


def publish(target: pathlib.Path, case: str, runs: dict) -> None:
    """Add {seed: rows} of a case to results.json; tables and plots anew."""
    write_results(target / "results.json", case, runs)
    results = reid_measures.read(target / "results.json")
    write_between(target / "README.md", "results", reid_findings.text(results))
    plots.draw(results, target)


def know_parts() -> None:
    """Make the parts a source that the configs of cases can name."""
    from fedfr_jax.data.sources import SOURCES, register_source

    if "market_part" not in SOURCES:
        register_source("market_part", market_parts.market_part)


def remember_programs(folder: pathlib.Path) -> None:
    """Keep compiled programs beside the run."""
    place = str((folder / "compiled").resolve())
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", place)


def run_case(config, case: str, seed: int, folder: pathlib.Path) -> dict:
    """{row: what `run_one` returns} of one case and seed, each kept once done."""
    from fedfr_jax.build import build
    from fedfr_jax.runs.workdir import claim

    config = cases.config_of(config, case, seed)
    place, settings = folder / case / f"seed{seed}", cases.settings_of(config)
    with claim(place, config.to_json_best_effort(indent=1)):
        path = place / "rows.json"
        rows = json.loads(path.read_text()) if path.exists() else {}
        missing = [name for name in settings if name not in rows]
        experiment = build(config) if missing else None
        for name in missing:
            rows[name] = run_one(experiment, place, name, settings[name])
            path.write_text(json.dumps(rows, indent=1))
            cost = rows[name]["cost"]
            print(f"{case}, seed {seed}, {name}: {cost['seconds']:.0f} s", flush=True)
    return {name: rows[name] for name in settings}


def run_one(experiment, folder: pathlib.Path, name: str, settings: dict) -> dict:
    """Train and judge one row, or go on with it."""
    from fedfr_jax.runs.experiment import run_stages

    begun, used = time.perf_counter(), time.process_time()
    alone = experiment._replace(stages={name: experiment.stages[name]})
    found = {key: of for key, of in run_stages(alone, folder)[name].items()}
    return {
        "made": provenance(),
        "settings": settings,
        "clients": clients_of(experiment),
        **{key: dict(found[key].metrics) for key in PROTOCOLS},
        "of_client": {
            key: found[key].per_client["rank1"].tolist()
            for key in PROTOCOLS[1:]
            if found[key].per_client
        },
        "of_round": curve_of(folder / name),
        "cost": {
            "seconds": round(time.perf_counter() - begun, 1),
            "core_seconds": round(time.process_time() - used, 1),
        },
    }


def clients_of(experiment) -> dict:
    """Names and images of the clients, in the order of `of_client`."""
    facts = experiment.task.facts
    images = [int(number) for number in facts["images"]]
    return {"names": list(facts["client_names"]), "images": images}


def curve_of(folder: pathlib.Path) -> list[float]:
    """Rank-1 after each round of the one network, or else the mean of clients' own."""
    from fedfr_jax.runs.sinks import read_jsonl

    path = folder / "metrics.jsonl"
    lines = read_jsonl(path) if path.exists() else []
    for key in ("generic/rank1", "personalised/rank1"):
        if curve := [line[key] for line in lines if key in line]:
            return curve
    return []


if __name__ == "__main__":
    use_every_core()
    main(sys.argv[1:])
