"""Seconds per round of this engine and of its peers, on the same work and in turns.

    python experiments/benchmarks/run.py
    python experiments/benchmarks/run.py --workloads=mlp_many --systems=ours,torch

Every repeat runs each system once per workload, one after another, each in its own
process and virtual environment, so that a slow spell of the machine meets all alike.
Writes results/<machine>.json after every process, and the table of RESULTS.md at the
end. A system that cannot be installed or does not finish is a row with the reason.
"""

import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import environments
import results_file
import table
import workloads

from fedfr_jax.cli.signals import exiting_on_signals

HERE, RESULTS = results_file.FOLDER, results_file.RESULTS
CORES = len(os.sched_getaffinity(0))


class System(NamedTuple):
    """A script of classifiers, the environment that runs it, and its threads."""

    script: str | None
    environment: str | None  # None: this interpreter
    threads: int = CORES


SYSTEMS = {
    "ours": System("ours.py", None),
    "central": System(None, None),  # all images in one place, not federated
    "torch": System("peer_torch.py", "torch"),
    "torch-1": System("peer_torch.py", "torch", 1),
    "fedjax": System("peer_fedjax.py", "fedjax"),
    "pfl": System("peer_pfl.py", "pfl"),
    "pfl-1": System("peer_pfl.py", "pfl", 1),
    "blazefl": System("peer_blazefl.py", "blazefl"),
    "blazefl-1": System("peer_blazefl.py", "blazefl", 1),
    "flower": System("peer_flower.py", "flower"),
    "tff": System("peer_tff.py", "tff"),
}
OTHERS = {  # scripts of workloads that are no classifiers of all leaves, by network
    "sphereface": {"ours": "ours.py", "torch": "peer_torch_face.py"},
    "vit": {
        "ours": "ours.py",
        "central": "central_lora.py",
        "torch": "peer_torch.py",
        "torch-1": "peer_torch.py",
        "pfl": "peer_pfl.py",
    },
}


def main():
    args = parse_arguments()
    path = args.output / f"{results_file.machine()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(path.read_text()) if path.exists() else []
    kept = [row for row in kept if row["workload"] not in args.workloads]
    pairs = [(w, s) for w in args.workloads for s in args.systems if script_of(w, s)]
    play = lambda pair: run_once(*pair, args.rounds, args.timeout)
    for runs, failures in in_turns(pairs, args.repeats, play):
        rows = kept + summarize(runs, failures)
        path.write_text(json.dumps(rows, indent=1) + "\n")
    if args.output == RESULTS:
        table.write(HERE / "RESULTS.md", path.stem, json.loads(path.read_text()))


def in_turns(
    pairs: Sequence[tuple[str, str]], repeats: int, play: Callable
) -> Iterator[tuple[dict, dict]]:
    """Run each pair's process once, one after another, and that `repeats` times.

    Args:
      pairs: of a workload and a system; one that fails is not run again.
      play: pair -> what its process reports; a RuntimeError when it fails.

    Yields:
      ({pair: reports}, {pair: why it failed}) after every process.
    """
    runs, failures = {pair: [] for pair in pairs}, {}
    for _ in range(repeats):
        for pair in pairs:
            if pair in failures:
                continue
            try:
                runs[pair].append(play(pair))
                last = runs[pair][-1]
                seconds = statistics.median(last["seconds"] or [last["first_seconds"]])
                print(*pair, f"{seconds:.4f} s", flush=True)
            except RuntimeError as error:
                failures[pair] = str(error)
                print(*pair, f"failed: {error}", flush=True)
            yield runs, failures


def parse_arguments() -> argparse.Namespace:
    """Flags; lists are given with commas."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = (
        ("workloads", workloads.WORKLOADS, workloads.MEASURED),
        ("systems", SYSTEMS, SYSTEMS),
    )
    for name, known, default in every:
        parser.add_argument(
            f"--{name}", type=choice_of(known), default=default, help=", ".join(known)
        )
    parser.add_argument("--rounds", type=int, default=5, help="timed, per process")
    parser.add_argument("--repeats", type=int, default=3, help="processes per system")
    parser.add_argument("--timeout", type=float, default=900, help="s per process")
    parser.add_argument(
        "--output", type=pathlib.Path, default=RESULTS, help="other folders: no table"
    )
    return parser.parse_args()


def choice_of(known):
    """Parser of a list with commas whose entries must be known."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"must be of {', '.join(known)}, got {name!r}."
                )
        return names

    return parse


def script_of(workload: str, system: str) -> str | None:
    """File that runs the workload; None when the system has none."""
    others = OTHERS.get(workloads.WORKLOADS[workload].model)
    return SYSTEMS[system].script if others is None else others.get(system)


def run_once(
    workload: str | None,
    system: str,
    rounds: int,
    timeout: float,
    *,
    script: str | None = None,
    flags: Sequence[str] = (),
    clean_up: Callable[[], None] = lambda: None,
) -> dict:
    """What the system's script reports of one process.

    Args:
      workload: None for a script that has none.
      script: instead of the workload's.
      flags: of the script, besides.
      clean_up: called when a signal ends this process and the script's.

    Raises:
      RuntimeError: when it cannot be installed, fails or takes too long.
    """
    environment, threads = SYSTEMS[system].environment, SYSTEMS[system].threads
    python = environments.python_of(environment) if environment else sys.executable
    command = [python, str(HERE / (script or script_of(workload, system)))]
    command += [f"--workload={workload}"] if workload else []
    command += [f"--rounds={rounds}", f"--threads={threads}", *flags]
    library = HERE.parents[1] if environment is None else None
    return report_of(command, threads, timeout, library, clean_up)


def report_of(
    command: list[str],
    threads: int,
    timeout: float,
    library: pathlib.Path | None,
    clean_up: Callable[[], None] = lambda: None,
) -> dict:
    """What one process reports.

    Args:
      library: the checkout whose library it imports; None in a peer's environment.
      clean_up: called when a signal ends this process and the other.

    Raises:
      RuntimeError: when it fails or takes too long.
    """
    mark, lock = uuid.uuid4().hex, threading.Lock()
    settings = {
        **os.environ,
        workloads.MARK: mark,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONWARNINGS": "ignore",
    }
    settings.pop("PYTHONPATH", None)  # a peer imports its environment's alone
    if library is not None:
        settings["PYTHONPATH"] = str(library)
    # A file and not a pipe: an orphan that holds a pipe open would be waited for.
    with tempfile.NamedTemporaryFile("w+", errors="replace", suffix=".log") as log:
        started = f"{time.strftime('%H:%M')}  {pathlib.Path(command[1]).name}"
        print(f"{started}, log: {log.name}", flush=True)

        def stop():
            lock.acquire()  # and keep it: the main thread waits for the end
            end(mark)
            clean_up()
            pathlib.Path(log.name).unlink(missing_ok=True)

        with exiting_on_signals(sys.argv[1:], stop):
            process = subprocess.Popen(
                command, env=settings, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"took longer than {timeout:.0f} s") from None
            finally:
                with lock:
                    end(mark)
                process.wait()
        log.seek(0)
        output = log.read()
    for line in output.splitlines():
        if line.startswith(workloads.PREFIX):
            return json.loads(line.removeprefix(workloads.PREFIX))
    last = (output.strip().splitlines() or ["no output"])[-1][:300]
    raise RuntimeError(f"exit code {process.returncode}: {last}")


def end(mark: str) -> None:
    """Kill what is left of a run: some systems leave orphans behind."""
    for process in workloads.processes(mark):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue


def summarize(runs: dict, failures: dict) -> list[dict]:
    """One row per workload and system, over the rounds of all processes."""
    rows, medians = [], {}
    for (workload, system), results in runs.items():
        row = {"workload": workload, "system": system}
        if (workload, system) in failures:
            row["failure"] = failures[workload, system]
        if results:
            row |= figures(workloads.WORKLOADS[workload], results)
            medians[workload, system] = row["seconds_median"]
        if len(row) > 2:
            rows.append(row)
    for row in rows:
        ours = medians.get((row["workload"], "ours"))
        if ours and "seconds_median" in row:
            row["ratio_to_ours"] = row["seconds_median"] / ours
    return rows


def figures(work, results: list[dict]) -> dict:
    """Figures of a row; facts that are not times come from the last process."""
    seconds = [x for result in results for x in result["seconds"]]
    known = ("seconds", "cpu_seconds", "first_seconds", "peak_mib")
    # The first round beyond one of the others: compiling, tracing, warming up.
    extra = [r["first_seconds"] - statistics.median(r["seconds"]) for r in results]
    return {
        "seconds_min": min(seconds),
        "seconds_median": statistics.median(seconds),
        "rounds": len(seconds),
        "clients_per_second": work.cohort / statistics.median(seconds),
        "cpu_seconds": min(x for result in results for x in result["cpu_seconds"]),
        "peak_mib": max(result["peak_mib"] for result in results),
        "first_seconds": statistics.median(r["first_seconds"] for r in results),
        "compile_seconds": max(statistics.median(extra), 0.0),
        "threads": CORES,
        "date": time.strftime("%Y-%m-%d"),
        "commit": results_file.commit(),
        **{k: v for k, v in results[-1].items() if k not in known},
    }


if __name__ == "__main__":
    main()
