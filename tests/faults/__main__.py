"""Every fault that the library is said to bear: python -m tests.faults.

[--quick] [--only=damage|inputs|kills] [--inputs=N] [--kills=N] [--workers=W]
[--processes 1 2]

Each part ends with a line of its date, commit and machine, which the tables of
docs/reliability.md carry.
"""

import argparse
import datetime
import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "experiments" / "benchmarks"))

from results_file import commit  # noqa: E402


def main() -> int:
    """0 when nothing was found, else 1."""
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fiftieth of it")
    parser.add_argument("--only", choices=("damage", "inputs", "kills"))
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
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
    fine = []
    for name in (x for x in parts if given.only in (None, x)):
        begun = made()  # before an hour in which the checkout may move
        fine.append(parts[name]())
        print(f"{name}: {begun}", flush=True)
    return 0 if all(fine) else 1


def made() -> str:
    """Today, the checkout's commit, with + where .py files differ, and the machine."""
    processor = re.search(
        "model name\\s*: (.+)", pathlib.Path("/proc/cpuinfo").read_text()
    )
    where = f"{len(os.sched_getaffinity(0))} cores of {processor and processor[1]}"
    return f"{datetime.date.today()}, commit {commit(ROOT) or 'unknown'}, {where}"


if __name__ == "__main__":
    sys.exit(main())
