"""Published jobs as commands: `fedfr bench JOB` runs ours and peers' programs in turns.

Each in a process and an environment of its own, on the same data. Writes
board/<job>-<machine>.json, whose schema is board/schema.json, and from all such files
the tables of docs/reference/board.md.
"""

import json
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import board_data
import environments
import results_file
import run
import table
import workloads
from board_jobs import JOBS, WHOLE, Job, Program

from fedfr_jax.json_files import read_json

FOLDER = results_file.FOLDER / "board"
PAGE = results_file.FOLDER.parents[1] / "docs" / "reference" / "board.md"
BEGIN = "<!-- board: fedfr bench writes from here -->"
KNOWN = ("seconds", "cpu_seconds", "first_seconds", "peak_mib", "rows")
COLUMNS = (
    ("system", "system", "{}"),
    ("version", "version", "{}"),
    ("rounds", "rounds", "{}"),
    ("clients a round", "cohort", "{}"),
    ("s/round median", "seconds_median", "{:.2f}"),
    ("s/round min", "seconds_min", "{:.2f}"),
    ("first round s", "first_seconds", "{:.1f}"),
    ("all s", "total_seconds", "{:.0f}"),
    ("peak MiB", "peak_mib", "{:.0f}"),
    ("accuracy", "accuracy", "{:.3f}"),
    ("simulated s", "simulated_seconds", "{:.0f}"),
    ("images/s", "images_per_second", "{:.0f}"),
    ("GiB a device", "gib_a_device", "{:.1f}"),
    ("GiB compiled", "compiled_gib", "{:.1f}"),
    ("GiB usable (75 %)", "usable_gib", "{:.1f}"),
    ("fits", "fits", "{}"),
    ("same bits", "same bits", "{}"),
    ("digest", "digest", "{}"),
)


class Options(NamedTuple):
    """How a job is run."""

    peers: Sequence[str] | None = None  # None: all of the job
    rounds: int | None = None  # of ours; None: the job's
    peer_rounds: int | None = None
    cohort: int | None = None  # clients of a round, fewer than the job's
    repeats: int = 1
    timeout: float = 4 * 3600  # seconds of a process


def jobs_text() -> str:
    """The jobs with a line each, and their programs."""
    lines = []
    for name, job in JOBS.items():
        lines += [f"{name}: {job.about}", f"  {', '.join(job.programs)}"]
    return "\n".join(lines)


def play(name: str, options: Options, output: pathlib.Path | None = None) -> None:
    """Run a job, write its JSON after every process, and print its table.

    Args:
      output: another folder for the JSON; then the page stays.

    Raises:
      ValueError: for an unknown job or peer, and at the end when a program has failed.
    """
    programs = chosen(name, options)
    install(programs)
    path = (output or FOLDER) / f"{name}-{results_file.machine()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        board, failures = play_in(pathlib.Path(folder), name, programs, options, path)
    print(f"\n{section(board)}\n\n{path}")
    if output is None:
        table.write_between(PAGE, BEGIN, page())
    if failures:
        reasons = "; ".join(f"{pair[1]}: {why}" for pair, why in failures.items())
        raise ValueError(f"fedfr bench {name}: all programs must run, got {reasons}")


def chosen(name: str, options: Options) -> dict[str, Program]:
    """Programs to run: ours, the whole job unless its rounds are given, and peers."""
    if name not in JOBS:
        raise ValueError(f"JOB must be one of {', '.join(JOBS)}, got {name!r}.")
    programs = JOBS[name].programs
    peers = [x for x in programs if not x.startswith("ours")]
    unknown = {*(options.peers or ())} - {*peers}
    if unknown:
        known = ", ".join(peers) or "none, as this job has none"
        raise ValueError(f"--peers must be of {known}, got {', '.join(unknown)}.")
    job, cohort = JOBS[name], options.cohort
    most = workloads.WORKLOADS[job.workload].population if job.workload else 0
    if cohort is not None and not 1 <= cohort <= most:
        rule = f"be from 1 to {most}" if most else f"be left out, as {name} has none"
        raise ValueError(f"--cohort must {rule}, got {cohort}.")
    left_out = {*peers} - {*(peers if options.peers is None else options.peers)}
    left_out |= {WHOLE} if options.rounds else set()
    return {k: x for k, x in programs.items() if k not in left_out}


def install(programs: dict[str, Program]) -> None:
    """Install what is missing of the programs' environments, before any is run.

    Raises:
      ValueError: for one that cannot be installed.
    """
    for key, program in programs.items():
        try:
            if environment := run.SYSTEMS[program.system].environment:
                environments.python_of(environment)
        except RuntimeError as error:
            raise ValueError(
                f"--peers must be of systems that can be installed, got {key}: {error} "
                "Leave it out."
            ) from None


def play_in(folder, name, programs, options, path) -> tuple[dict, dict]:
    """(JSON, {pair: why it failed}) after all programs, with data in the folder."""
    job, pairs = JOBS[name], [(name, key) for key in programs]
    rounds = {
        key: (options.rounds if key.startswith("ours") else options.peer_rounds)
        or program.rounds
        for key, program in programs.items()
    }
    data, play_one = player(folder, job, programs, rounds, options)
    board, failures = kept_board(path, name, job, data), {}
    for runs, failures in run.in_turns(pairs, options.repeats, play_one):
        for (_, key), results in runs.items():
            made = rows_of(key, programs[key], results, rounds[key], options, job)
            replace_rows(board, key, made)
        for (_, key), why in failures.items():
            if not any("failure" not in row for row in rows_by(board, key)):
                failure = {"system": key, "failure": why, **facts()}
                replace_rows(board, key, [failure])
        path.write_text(json.dumps(board, indent=1) + "\n")
    return board, failures


def player(folder, job, programs, rounds, options) -> tuple[dict, Callable]:
    """(what the JSON says of the data, (job, program) -> report of its process)."""
    flags, data = [], {}
    if job.workload and job.data:
        work = workloads.WORKLOADS[job.workload]
        file = folder / "data.npz"
        data, flags = board_data.write(file, work, *job.data), [f"--data={file}"]
    flags += [f"--cohort={options.cohort}"] if options.cohort else []

    def play_one(pair):
        key = pair[1]
        return run.run_once(
            job.workload,
            programs[key].system,
            rounds[key] - 1,
            options.timeout,
            script=programs[key].script,
            flags=[*flags, *programs[key].flags],  # its own come last, and win
            clean_up=lambda: shutil.rmtree(folder),  # if a signal ends this
        )

    return data, play_one


def facts() -> dict:
    """When and of which code a row is."""
    return {"date": time.strftime("%Y-%m-%d"), "commit": results_file.commit()}


def kept_board(path: pathlib.Path, name: str, job: Job, data: dict) -> dict:
    """The JSON with the rows that other programs have made of the same data."""
    rows = []
    if path.exists() and (kept := read_json(path)).get("data") == data:
        rows = kept["rows"]
    published = [{"what": what, "figure": text} for what, text in job.published]
    about = {"job": name, "about": job.about, "source": job.source}
    machine = results_file.machine()
    return {
        **about,
        "machine": machine,
        "command": f"fedfr bench {name}",
        "data": data,
        "published": published,
        "rows": rows,
    }


def rows_by(board: dict, key: str) -> list[dict]:
    """Rows that a program has made."""
    return [x for x in board["rows"] if x.get("program", x["system"]) == key]


def replace_rows(board: dict, key: str, made: list[dict]) -> None:
    """Put a program's rows in place of those that it had, in the job's order."""
    if not made:
        return
    old = rows_by(board, key)
    rows = [x for x in board["rows"] if x not in old] + made
    order = [*JOBS[board["job"]].programs]
    place = lambda x: order.index(x.get("program", x["system"]))
    board["rows"] = sorted(rows, key=place)


def rows_of(
    key: str,
    program: Program,
    results: list[dict],
    rounds: int,
    options: Options,
    job: Job,
) -> list[dict]:
    """Rows of a program, from the reports of its processes."""
    if not results:
        return []
    last = results[-1]
    row = {
        "system": key,
        "version": last["version"],
        "rounds": rounds,
        "repeats": len(results),
        "peak_mib": max(x["peak_mib"] for x in results),
        **{k: x for k, x in last.items() if k not in KNOWN},
        **facts(),
    }
    if "digest" in last and len(results) > 1:
        is_same = len({x["digest"] for x in results}) == 1
        row["same bits"] = "yes, again" if is_same else "no, again"
    if program.changed:
        row["changed"] = program.changed
    if "rows" in last:  # each a row of its own, planned and not run
        own = {k: x for k, x in row.items() if k not in ("rounds", "peak_mib")}
        return [{**own, **x, "program": key} for x in last["rows"]]
    if job.workload and "digests" not in last:
        work = workloads.WORKLOADS[job.workload]
        work = work._replace(cohort=options.cohort or work.cohort)
        row |= {"cohort": work.cohort, "total_seconds": total_seconds(results)}
        row["first_seconds"] = statistics.median(x["first_seconds"] for x in results)
        if last["seconds"]:
            row = {**run.figures(work, results), **row}
    return [row]


def total_seconds(results: list[dict]) -> float:
    """Seconds of all rounds and evaluations of a process, the median of several."""
    return statistics.median(
        x["first_seconds"] + sum(x["seconds"]) + x.get("evaluation_seconds", 0.0)
        for x in results
    )


def page() -> list[str]:
    """Parts of the page: a section for each JSON, in the order of the jobs."""
    boards = [read_json(path) for path in sorted(FOLDER.glob("*-*core.json"))]
    order = [*JOBS]
    boards.sort(key=lambda board: (order.index(board["job"]), board["machine"]))
    return [section(board) for board in boards]


def section(board: dict) -> str:
    """A job on a machine: the table, what was changed, what others have published."""
    parts = [f"### {board['job']}, {board['machine']}", f"{board['about']}."]
    parts.append(f"Source: {board['source']}. The whole job: `{board['command']}`.")
    if board["data"]:
        parts.append(f"Data: {board['data']['note']}.")
    parts.append(table.table(board["rows"], COLUMNS))
    notes = [
        f"- {row['system']}: {row[key]}."
        for row in board["rows"]
        for key in ("changed", "note")
        if key in row
    ]
    for entry in board["published"]:
        notes.append(f"- published, not measured here: {entry['what']}: ")
        notes[-1] += f"{entry['figure']}."
    parts += ["\n".join(notes)] if notes else []
    return "\n\n".join(parts)
