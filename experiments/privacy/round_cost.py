"""What a private round costs: beside a plain one, and beside pfl-research's.

    python experiments/privacy/round_cost.py [--turns=3] [--pfl_python=PATH]

The benchmarks' workload mlp_many (512 clients of 20 images, 51,000 numbers): rounds of
ours in turns in one process, then pfl-research's without and with its central Gaussian
mechanism, a process each; all of it again in every turn. One core each. Writes
round_cost.json here and the table in README.md.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
BENCHMARKS = HERE.parent / "benchmarks"
sys.path[:0] = [str(HERE.parent / "fedfr_tables"), str(BENCHMARKS)]
import workloads  # noqa: E402

WORKLOAD = "mlp_many"
NAMES = ("ours", "ours, private", "pfl", "pfl, private")


def play(rounds: int) -> dict[str, list]:
    """{"ours", "ours, private": [wall, CPU] seconds of each round but the first}."""
    import jax
    import ours

    import fedfr_jax as ff
    from fedfr_jax.federated import simulation
    from fedfr_jax.mesh import make_mesh
    from fedfr_jax.types import Cohort

    work = workloads.WORKLOADS[WORKLOAD]
    data, (plain, *rest) = workloads.make_data(work), ours.classifier(work)
    covered = ff.private(
        plain,
        ff.Privacy(
            clip_norm=workloads.CLIP_NORM,
            noise_multiplier=workloads.NOISE_MULTIPLIER,
            cohort_size=work.cohort,
            delta=1e-4,
        ),
    )
    runs, seconds = {}, {name: [] for name in NAMES[:2]}
    for name, algorithm in zip(NAMES, (plain, covered), strict=False):
        made = (algorithm, *rest)
        sim, server, _ = ours.build(work, data, made, mesh=make_mesh(1))
        runs[name] = sim, server, simulation.open_store(sim, server)
    for round in range(1 + rounds):
        for name, (sim, server, store) in runs.items():
            begun = time.perf_counter(), time.process_time()
            cohort = Cohort(workloads.cohort(work, round), round)
            server, _ = simulation.run_cohort(sim, server, store, cohort)
            jax.block_until_ready(server)
            ended = time.perf_counter(), time.process_time()
            seconds[name].append([b - a for a, b in zip(begun, ended, strict=True)])
            runs[name] = sim, server, store
    return {name: of[1:] for name, of in seconds.items()}


def of_peer(python: str, rounds: int, is_private: bool) -> list:
    """[wall, CPU] seconds of pfl's rounds."""
    words = [python, str(BENCHMARKS / "peer_pfl.py"), f"--workload={WORKLOAD}"]
    words += [f"--rounds={rounds}", "--threads=1", *is_private * ["--private"]]
    environment = {**os.environ, workloads.MARK: f"private-{os.getpid()}"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        words, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    row = json.loads(done.stdout.rpartition(workloads.PREFIX)[2])
    return [[*pair] for pair in zip(row["seconds"], row["cpu_seconds"], strict=True)]


def table(found: dict) -> str:
    """Markdown: milliseconds of a round, and private over plain."""
    lines = ["| system | plain | private | ratio |", "| --- | --- | --- | --- |"]
    for system in ("ours", "pfl"):
        plain, private = (found[x] for x in (system, f"{system}, private"))
        cells = [f"{x['fastest']:.0f} ({x['median']:.0f}) ms" for x in (plain, private)]
        ratio = private["fastest"] / plain["fastest"]
        cpu = private["cpu"] / plain["cpu"]
        lines.append(
            f"| {system} | {' | '.join(cells)} | {ratio:.2f} (CPU {cpu:.2f}) |"
        )
    return "\n".join(lines)


def summary(seconds: list) -> dict:
    """Milliseconds of the rounds of one system."""
    wall, cpu = zip(*seconds, strict=True)
    return {
        "fastest": round(1e3 * min(wall), 2),
        "median": round(1e3 * statistics.median(wall), 2),
        "cpu": round(1e3 * statistics.median(cpu), 2),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pfl_python", help="its environment; default: made anew")
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ours:
        print(json.dumps(play(given.rounds)))
        return
    if not (python := given.pfl_python):
        import environments

        python = environments.python_of("pfl")
    seconds = {name: [] for name in NAMES}
    me = [sys.executable, __file__, "--ours", f"--rounds={given.rounds}"]
    for _ in range(given.turns):
        done = subprocess.run(me, check=True, stdout=subprocess.PIPE, text=True)
        for name, of in json.loads(done.stdout.splitlines()[-1]).items():
            seconds[name] += of
        for name, is_private in zip(NAMES[2:], (False, True), strict=True):
            seconds[name] += of_peer(str(python), given.rounds, is_private)
    found = {name: summary(of) for name, of in seconds.items()}
    print(table(found))
    from orderings import provenance, write_between

    text = json.dumps({**found, "made": provenance()}, indent=1)
    (HERE / "round_cost.json").write_text(text)
    write_between(HERE / "README.md", "cost", table(found))


if __name__ == "__main__":
    main()
