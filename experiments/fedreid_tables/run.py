"""FedReID's tables in small: every case and seed, tables and claims.

    python experiments/fedreid_tables/run.py --config=configs/fedreid/tables.py \
        --workdir=runs/fedreid_tables [--seeds=0,1,2] [--cases=by_camera,...]

Goes on where it was stopped: a row that is done is a file. Writes results.json (every
row of every case and seed), the part of RESULTS.md between markers, beside
this file or under --results.
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOM = HERE.parent
sys.path[:0] = map(str, (ROOM.parent, ROOM, HERE, ROOM / "fedfr_tables"))

import market_parts  # noqa: E402
import reid_cases as cases  # noqa: E402
import reid_findings  # noqa: E402
import studies  # noqa: E402

from fedfr_jax.distributed import use_every_core  # noqa: E402

PROTOCOLS = ("generic", "personalized", "local")


def know_parts() -> None:
    """Make the parts a source that the configs of cases can name."""
    from fedfr_jax.data.sources import SOURCES, register_source

    if "market_part" not in SOURCES:
        register_source("market_part", market_parts.market_part)


def kept(experiment, found, folder: pathlib.Path) -> dict:
    """Metrics of a row, of its clients and of its rounds."""
    return {
        "clients": clients_of(experiment),
        **{key: dict(found[key].metrics) for key in PROTOCOLS},
        "of_client": {
            key: found[key].per_client["rank1"].tolist()
            for key in PROTOCOLS[1:]
            if found[key].per_client
        },
        "of_round": curve_of(folder),
    }


def clients_of(experiment) -> dict:
    """Names and images of the clients, in the order of `of_client`."""
    facts = experiment.task.data_report
    images = [int(number) for number in facts["images"]]
    return {"names": list(facts["client_names"]), "images": images}


def curve_of(folder: pathlib.Path) -> list[float]:
    """Rank-1 after each round of the one network, or else the mean of clients' own."""
    from fedfr_jax.runs.sinks import read_jsonl

    path = folder / "metrics.jsonl"
    lines = read_jsonl(path) if path.exists() else []
    for key in ("generic/rank1", "personalized/rank1"):
        if curve := [line[key] for line in lines if key in line]:
            return curve
    return []


STUDY = studies.Study(
    HERE,
    cases.CASES,
    cases.config_of,
    kept,
    reid_findings.text,
    cases.prepared,
)

if __name__ == "__main__":
    use_every_core()
    know_parts()
    studies.main(STUDY, __doc__, sys.argv[1:])
