"""Every fault that the library is said to bear: python -m tests.faults.

[--quick] [--only=damage|inputs|kills] [--inputs=N] [--kills=N] [--workers=W]
[--processes 1 2] [--out=FILE.json]

Each part ends with a line of its date, commit and machine; --out keeps its numbers
beside these and the command, as experiments/benchmarks/results/faults.json has them.
"""

import argparse
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "experiments" / "benchmarks"))

import results_file  # noqa: E402


def main() -> int:
    """0 when nothing was found, else 1."""
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fiftieth of it")
    parser.add_argument("--only", choices=("damage", "inputs", "kills"))
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=pathlib.Path, help="JSON file of the numbers")
    given = parser.parse_args()
    part = 50 if given.quick else 1
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    from tests.faults import damage, inputs, kills  # after the devices are said

    parts = {
        "damage": lambda: damage.report(step=10 if given.quick else 1),
        "inputs": lambda: inputs.report(given.inputs // part, given.workers),
        "kills": lambda: kills.report(
            max(given.kills // part, 2), given.workers, tuple(given.processes)
        ),
    }
    findings = []
    for name in (x for x in parts if given.only in (None, x)):
        made = facts()  # before an hour in which the checkout may move
        found = parts[name]()
        for row, value in found["table"].items():
            print(f"{row}: {value}")
        print(*found["findings"][:40], sep="\n")
        print(f"{len(found['findings'])} findings, {found['seconds']} s", flush=True)
        findings += found["findings"]
        where = f"commit {made['commit']}, {made['machine']}"
        print(f"{name}: {made['date']}, {where}", flush=True)
        if given.out:
            results_file.write(given.out, {name: found}, made)
    return 1 if findings else 0


def facts() -> dict:
    """Of this command."""
    words = ["python -m tests.faults", *sys.argv[1:]]
    return results_file.facts() | {"command": " ".join(words)}


if __name__ == "__main__":
    sys.exit(main())
