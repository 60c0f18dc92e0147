"""Bench: published jobs beside the programs of peers."""

import os
import pathlib
import runpy
import sys

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "benchmarks"


def bench(
    job: str | None = None,
    *,
    peers: tuple[str, ...] | None = None,
    rounds: int | None = None,
    peer_rounds: int | None = None,
    cohort: int | None = None,
    repeats: int = 1,
    timeout: int = 14400,
    output: str | None = None,
) -> None:
    """Run a published job beside peers' programs: seconds, memory, accuracy.

    Ours and each peer in a process and an environment of its own, on the same data and
    in turns. Writes one JSON with machine, versions, seconds, memory, accuracy and what
    was changed of a peer's program, and the tables of docs/reference/board.md. A peer's
    packages are installed at its first use, in minutes. Without a JOB it lists them.

      fedfr bench pfl-cifar10 --peers=pfl --rounds=10 --peer_rounds=10

    Needs Linux, and a clone of the repository, which holds the jobs and the peers'
    programs.

    Args:
      job: JOB name of a job
      peers: A,B peers to run (default all of the job; --peers= for none)
      rounds: N rounds of ours, the first of which compiles, without the whole job
        (default the job's)
      peer_rounds: N rounds of a peer (default the job's)
      cohort: N clients of a round, fewer than the job's (default the job's)
      repeats: N processes of each program
      timeout: N seconds after which a process is ended
      output: DIR folder for the JSON, without the page (default
        experiments/benchmarks/board)
    """
    if not (FOLDER / "board.py").is_file():
        raise ValueError(
            "fedfr bench needs a clone of the repository, whose experiments/benchmarks "
            f"has the jobs, got none at {FOLDER}. Clone it and run fedfr there."
        )
    if not hasattr(os, "sched_getaffinity"):
        raise ValueError(
            "fedfr bench needs Linux, which reports cores and memory of a process, "
            f"got {sys.platform}. Run it in a container."
        )
    sys.path.insert(0, str(FOLDER))  # of the modules that it imports
    board = runpy.run_path(str(FOLDER / "board.py"))
    if job is None:
        print(board["jobs_text"]())
        return
    numbers = {"rounds": rounds, "peer_rounds": peer_rounds}
    for name, number in {**numbers, "repeats": repeats, "timeout": timeout}.items():
        if number is not None and number < 1:
            raise ValueError(f"--{name} must be at least 1, got {number}.")
    settings = peers, rounds, peer_rounds, cohort, repeats, timeout
    place = pathlib.Path(output) if output else None
    board["play"](job, board["Options"](*settings), place)
