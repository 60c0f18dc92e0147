"""Partial FC's table as `fedfr plan` sees it: each number of people and column."""

import argparse

import workloads

from fedfr_jax.cli.plan import print_plan, use_virtual
from fedfr_jax.config.files import find, load
from fedfr_jax.version import library_version

NAME = "bench/partial_fc"
COLUMNS = {"model parallel": 1.0, "Partial FC 0.1": 0.1}  # share of other people
PEOPLE = ("125000", "1400000", "5500000", "8000000")
STAGE = "pretrained"


def row_of(people: str, column: str, args) -> dict:
    """Plan of a row: images/s of all devices, and memory of each."""
    config = load(find(NAME), people)
    with config.unlocked():
        config.pretrain.class_sample_rate = COLUMNS[column]
    settings = {"device": args.device, "devices": args.num_devices}
    plan = print_plan(config, methods=[STAGE], **settings)["stages"][STAGE]
    return {
        "system": f"ours, {args.num_devices} x {args.device}: {people}, {column}",
        "images_per_second": plan["images_per_second"],
        "gib_a_device": plan["total_bytes"] / 2**30,
        "fits": "yes" if plan["fits"] else "no",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("rounds", int), ("threads", int), ("num_devices", int)):
        parser.add_argument(f"--{name}", type=kind, default=1)
    parser.add_argument("--device", required=True)
    parser.add_argument("--people", help="only this row")
    args = parser.parse_args()
    use_virtual(args.num_devices)
    words = [args.people] if args.people else PEOPLE
    clock = workloads.Clock()
    with clock:
        rows = [row_of(people, column, args) for people in words for column in COLUMNS]
    workloads.report(f"fedfr_jax {library_version()}", clock, rows=rows)


if __name__ == "__main__":
    main()
