"""Partial FC's table as `fedfr plan --compile` sees it: numbers of people, columns."""

import argparse

import workloads

from fedfr_jax.cli.aot_compile import compile_for
from fedfr_jax.cli.plan import print_plan, use_virtual
from fedfr_jax.config.files import find, load
from fedfr_jax.plan.devices import parse_grid
from fedfr_jax.version import library_version

NAME = "bench/partial_fc"
COLUMNS = {"model parallel": 1.0, "Partial FC 0.1": 0.1}  # share of other people
PEOPLE = ("125000", "1400000", "5500000", "8000000")
STAGE = "pretrained"


def row_of(people: str, column: str, device: str) -> dict:
    """Plan of a row: images/s of all devices; memory of each, expected and compiled.

    Args:
      device: a grid, such as v100:1x1x8.
    """
    config, rate = load(find(NAME), people), COLUMNS[column]
    with config.unlocked():
        config.pretrain.class_sample_rate = rate
    kind, number = device.partition(":")[0], parse_grid(device).num_devices
    plan = print_plan(config, methods=[STAGE], device=kind, devices=number)
    plan = plan["stages"][STAGE]
    flags = [f"--config={NAME}:{people}", f"--config.pretrain.class_sample_rate={rate}"]
    (step,) = compile_for(device, [*flags, f"--methods={STAGE}"])[STAGE].values()
    compiled = {"compiled_gib": step["gib"]["needed"]} if "gib" in step else {}
    return {
        "system": f"ours, {number} x {kind}: {int(people):,} people, {column}",
        "images_per_second": plan["images_per_second"],
        "gib_a_device": plan["total_bytes"] / 2**30,
        **compiled,
        "usable_gib": plan["usable_bytes"] / 2**30,
        "fits": "yes" if plan["fits"] and step["fits"] else "no",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("rounds", "threads"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--device", required=True, help="a grid, such as v100:1x1x8")
    parser.add_argument("--people", help="only this row")
    args = parser.parse_args()
    use_virtual(parse_grid(args.device).num_devices)
    words = [args.people] if args.people else PEOPLE
    clock = workloads.Clock()
    with clock:
        rows = [
            row_of(people, column, args.device)
            for people in words
            for column in COLUMNS
        ]
    workloads.report(f"fedfr_jax {library_version()}", clock, rows=rows)


if __name__ == "__main__":
    main()
