"""One GPU for ten minutes: what to run there, in the order of what it tells.

    experiments/benchmarks/lease.sh [--cases=emnist,r100_93k] [--folder=FOLDER]
    experiments/benchmarks/lease.sh --smoke    # tiny, on a CPU

Every case is a process of its own with a limit in seconds: one that hangs or fails
costs no other. A row is kept as soon as it is measured, FOLDER/lease-<device>.json is
written after every case, and the table of all rows is printed at the end.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import results_file

HERE = pathlib.Path(__file__).resolve().parent
BUDGET = 590  # seconds in all


class Case(NamedTuple):
    """A question, asked by a process of its own."""

    name: str
    limit: int  # seconds
    command: tuple[str, ...]


def ours(name: str, limit: int) -> Case:
    """A case of lease_case.py."""
    return Case(name, limit, ("lease_case.py", name))


def torch(name: str, limit: int) -> Case:
    """The same work in PyTorch: torch.func.vmap over clients, compiled."""
    return Case(f"{name}_torch", limit, ("peer_torch_vmap.py", f"--work={name}"))


CASES = (
    ours("parity", 40),  # do we compute what a CPU computes?
    ours("emnist", 75),  # the engine on small clients; goal: 10,000 clients a second
    ours("emnist_sizes", 50),  # loops of one or two lengths for unequal clients
    ours("cifar10", 45),  # BlazeFL's job in 5 seconds, theirs takes 30
    ours("r100_93k", 80),  # a big face network; goal: 31 % MFU
    torch("emnist", 45),
    ours("resnet18", 65),
    torch("resnet18", 40),
    ours("r50_93k", 50),
    ours("iresnet50", 60),
    torch("iresnet50", 40),
)
COLUMNS = {  # of the table: title -> key of a row
    "case": "case",
    "system": "system",
    "lanes": "lanes",
    "convolution": "forms",
    "dtype": "dtype",
    "steps a loop": "steps_per_loop",
    "rounds a call": "rounds_per_call",
    "clients/s": "clients_per_second",
    "job s": "job_seconds",
    "images/s": "images_per_second",
    "MFU": "mfu",
    "loss": "loss",
    "compile s": "compile_seconds",
    "GiB": "gib",
    "failure": "failure",
}


def main():
    args = parse_arguments()
    begin, rows = time.perf_counter(), []
    for case in CASES:
        if args.cases and case.name not in args.cases:
            continue
        budget = 4 * BUDGET if args.smoke else BUDGET  # a CPU may be busy
        left = budget - (time.perf_counter() - begin)
        if left < 5:
            print(f"{case.name} left out: {budget} s are over", flush=True)
            continue
        limit = left if args.smoke else min(case.limit, left)
        rows += run(case, limit, args.smoke)
        path = save(rows, args.folder)
    print(table(rows), f"\n{path}", flush=True)


def parse_arguments():
    """Flags; lists are given with commas."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--cases", type=lambda text: text.split(","), help=str(names))
    parser.add_argument("--folder", type=pathlib.Path, default=results_file.RESULTS)
    args = parser.parse_args()
    if unknown := {*(args.cases or ())} - {*names}:
        parser.error(f"--cases must be of {names}, got {sorted(unknown)}.")
    return args


def run(case: Case, limit: float, is_smoke: bool) -> list[dict]:
    """The rows that a case printed before it ended or its limit was reached."""
    script, *words = case.command
    words += ["--smoke"] if is_smoke else []
    print(f"{case.name}, at most {limit:.0f} s", flush=True)
    begin, failure = time.perf_counter(), None
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        try:
            command = [sys.executable, str(HERE / script), *words]
            done = subprocess.run(command, stdout=out, stderr=errors, timeout=limit)
            if done.returncode:
                failure = last_line(errors)
        except subprocess.TimeoutExpired:
            failure = f"stopped after {limit:.0f} s"
        out.seek(0)
        rows = [json.loads(line) for line in out if line.startswith("{")]
    if failure:
        rows.append({"failure": failure})
    seconds = time.perf_counter() - begin
    rows = [{"case": case.name, **row} for row in rows]
    for row in rows:
        print(json.dumps(row), flush=True)
    print(f"{case.name} took {seconds:.0f} s", flush=True)
    return rows


def last_line(errors) -> str:
    """The last line of what a process said, of at most 200 characters."""
    errors.seek(0)
    lines = errors.read().strip().splitlines() or ["no message"]
    return lines[-1][:200]


def save(rows: list[dict], folder: pathlib.Path) -> pathlib.Path:
    """Write all rows so far, with command, commit and device."""
    # Another process asks JAX, so that this one holds no memory of the device.
    code = "import json, results_file; print(json.dumps(results_file.facts()))"
    facts = json.loads(subprocess.check_output([sys.executable, "-c", code], cwd=HERE))
    facts["command"] = " ".join(["experiments/benchmarks/lease.sh", *sys.argv[1:]])
    slug = re.sub(r"[^a-z0-9]+", "-", facts["device"].lower()).strip("-")
    path = folder / f"lease-{slug}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    return path


def table(rows: list[dict]) -> str:
    """All rows as Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- " * len(COLUMNS) + "|"]
    for row in rows:
        cells = [shown(row.get(key)) for key in COLUMNS.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shown(value) -> str:
    """A cell: three digits of a number, nothing for nothing."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
    return str(value)


if __name__ == "__main__":
    main()
