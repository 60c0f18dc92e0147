"""Seconds of our own rounds in two checkouts, in turns: did a change cost speed?

    git worktree add ../before v0.1.0
    python experiments/benchmarks/before.py --before=../before

Every repeat runs each workload in both, one after the other, each in a process of its
own with that checkout's own script and library, so that a slow spell of the machine
meets both. Only the rounds are timed, not their phases. Writes results/before.json
after every workload.
"""

import argparse
import pathlib
import statistics
import sys

import results_file
import run
import workloads

SCRIPT = pathlib.Path("experiments", "benchmarks", "ours.py")
NOW = results_file.FOLDER.parents[1]
# A checkout's `ours` without the phases of a round: they are not compared, and they
# use more of the library than the rounds do.
ROUNDS_ONLY = """
import ours, phases
phases.step_flops = phases.matmul_rate = lambda *_: 1.0
phases.seconds = lambda *_: {}
if hasattr(ours, "choose"):  # a commit that still tuned itself, for minutes
    ours.choose = lambda workload: ()
    ours.tuned = lambda work, data, setting: ours.build(work, data)
ours.main()
"""


def main():
    args = parse_arguments()
    checkouts = {"before": args.before.resolve(), "now": NOW}
    commits = {name: results_file.commit(path) for name, path in checkouts.items()}
    for workload in args.workloads:
        found = {name: [] for name in checkouts}
        for _ in range(args.repeats):
            for name, checkout in checkouts.items():
                drivers = checkout / SCRIPT.parent
                code = f"import sys; sys.path.insert(0, {str(drivers)!r}){ROUNDS_ONLY}"
                command = [sys.executable, "-P", "-c", code]
                command += [f"--workload={workload}", f"--rounds={args.rounds}"]
                command += [f"--threads={run.CORES}"]
                told = run.report_of(command, run.CORES, args.timeout, checkout)
                found[name].append(told["seconds"])
                median = statistics.median(told["seconds"])
                print(workload, name, f"{median:.4f} s", flush=True)
        results_file.write(args.out, {workload: {**row_of(found), "commits": commits}})


def parse_arguments() -> argparse.Namespace:
    """Flags; lists are given with commas."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=pathlib.Path, required=True, help="checkout")
    known = run.choice_of(workloads.WORKLOADS)
    parser.add_argument("--workloads", type=known, default=workloads.MEASURED)
    parser.add_argument("--rounds", type=int, default=5, help="timed, per process")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each")
    parser.add_argument("--timeout", type=float, default=900, help="s per process")
    results_file.add_flag(parser)
    args = parser.parse_args()
    if not (args.before / SCRIPT).is_file():
        parser.error(f"--before must be a checkout with {SCRIPT}, got {args.before}.")
    return args


def row_of(found: dict[str, list[list[float]]]) -> dict:
    """A workload's row of the seconds of every process of "before" and "now"."""
    row = {
        name: {
            "fastest": min(min(seconds) for seconds in processes),
            "medians": [statistics.median(seconds) for seconds in processes],
        }
        for name, processes in found.items()
    }
    before, now = row["before"], row["now"]
    middle = lambda of: statistics.median(of["medians"])
    return {
        **row,
        "now over before, fastest": now["fastest"] / before["fastest"],
        "now over before, median of medians": middle(now) / middle(before),
    }


if __name__ == "__main__":
    main()
