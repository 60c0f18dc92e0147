"""Runs that are killed at any moment end with the bits of one that nobody stopped.

An experiment of three stages (pretraining, FedAvg, FedFR) with a checkpoint every third
epoch and round is started again and again, and killed each time just before a random
change of a file in its folder. When it has reached its end, everything that it leaves
but the seconds is compared with an uninterrupted run's.
"""

import collections
import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import numpy as np
import orbax.checkpoint as ocp

from tests.cli.conftest import ROOT, write_face_config

INJECT = pathlib.Path(__file__).parent / "inject"
STAGES = ("pretrained", "fedavg", "fedfr")
VERSIONS = 3  # of a row in a store
KEYS = {
    "pretrain.epochs": 7,
    "pretrain.checkpoint_every": 3,
    "federation.rounds": 8,
    "federation.local_epochs": 1,
    "federation.cohort_size": 2,
    "federation.checkpoint_every": 3,
}
WORDS = [f"--config.{key}={value}" for key, value in KEYS.items()]


class Setup(NamedTuple):
    """An experiment on `processes` processes and what it ends with."""

    folder: pathlib.Path
    processes: int
    events: tuple[int, ...]  # changes of files, of each process
    ends: dict


def train(folder, workdir, processes: int, **faults) -> tuple[int, str]:
    """Start or go on under `workdir`; `faults` are variables of sitecustomize.

    Returns its exit status and what it prints; all of its session is gone afterwards.
    """
    devices = f"--xla_force_host_platform_device_count={2 // processes}"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{INJECT}{os.pathsep}{ROOT}",
        "XLA_FLAGS": f"{devices} --xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "FEDFR_DATA": "",
        "XDG_CACHE_HOME": str(folder / "cache"),
        **{f"FAULTS_{name.upper()}": str(value) for name, value in faults.items()},
    }
    launch = ["launch", f"--processes_per_host={processes}"] if processes > 1 else []
    config = f"--config={folder / 'configs' / 'tiny.py'}"
    process = subprocess.Popen(
        [sys.executable, "-m", "fedfr_jax", *launch, "train", config, *WORDS]
        + [f"--workdir={workdir}"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=600)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def ends_of(workdir: pathlib.Path) -> dict:
    """All that a run leaves, but for seconds, by name."""
    ends = {"summary": json.loads((workdir / "summary.json").read_text())["methods"]}
    ends["partition"] = (workdir / "partition.json").read_text()
    for stage in STAGES:
        folder = workdir / stage
        for path in folder.glob("*.jsonl"):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            ends[f"{stage} {path.stem}"] = [
                {k: v for k, v in row.items() if "second" not in k} for row in rows
            ]
        steps = sorted(int(p.name) for p in (folder / "checkpoints").glob("[0-9]*"))
        ends[f"{stage} checkpoints"] = steps
        newest = folder / "checkpoints" / str(steps[-1]) / "default"
        with ocp.PyTreeCheckpointer() as reader:  # wherever they were written
            names = reader.metadata(newest).item_metadata.tree
            kinds = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
            leaves = reader.restore(newest, restore_args=kinds)
        for name, leaf in leaves.items():
            ends[f"{stage} {name}"] = (leaf.dtype, leaf.shape, leaf.tobytes())
        if (folder / "store").exists():
            ends[f"{stage} store"] = rows_of(folder / "store")
    return ends


def rows_of(folder: pathlib.Path) -> list:
    """(newest stamp, its row) of every client."""
    stamps = np.fromfile(folder / "stamps.bin", np.int32).reshape(-1, VERSIONS)
    rows = np.fromfile(folder / "rows.bin", np.uint8)
    rows = rows.reshape(*stamps.shape, -1)
    newest = stamps.argmax(axis=1)
    return [
        (int(s[v]), row[v].tobytes() if s[v] else b"")
        for s, row, v in zip(stamps, rows, newest, strict=True)
    ]


def set_up(folder: pathlib.Path, processes: int) -> Setup:
    """Uninterrupted runs; of each process the changes of files are counted in one."""
    ends, events = [], []
    for i in range(processes + 1):
        workdir, log = (folder / f"{name}{processes}-{i}" for name in ("whole", "log"))
        log.touch()
        _, output = train(
            folder,
            workdir,
            processes,
            root=workdir,
            kill=0,
            log=log,
            process=i % processes,
        )
        if not (workdir / "summary.json").exists():
            raise RuntimeError(f"the uninterrupted run must end, got {output[-3000:]}")
        ends.append(ends_of(workdir))
        events.append(len(log.read_text().splitlines()))
    if different(ends[0], ends[1]):
        raise RuntimeError("two uninterrupted runs must end with the same bits")
    # The last run is of process 0 again, with all programs compiled.
    return Setup(folder, processes, (events[-1], *events[1:-1]), ends[0])


def different(ends: dict, expected: dict) -> list[str]:
    """Names of what is not the same."""
    names = ends.keys() | expected.keys()
    return sorted(name for name in names if ends.get(name) != expected.get(name))


def chain(setup: Setup, seed: int, is_enough, kills: collections.Counter) -> list[str]:
    """Kill and start a run until it ends; what differs then, or what it said."""
    rng = random.Random(seed)
    workdir = setup.folder / f"chain{setup.processes}-{seed}"
    while True:
        faults = {}
        if not is_enough():
            number = rng.randrange(setup.processes)
            # The first events of a resumed run as often as those of all three stages.
            most = rng.choice((60, setup.events[number]))
            faults = {"root": workdir, "kill": rng.randrange(1, most + 1)}
            faults["process"] = number
        status, output = train(setup.folder, workdir, setup.processes, **faults)
        if status == 0:
            return different(ends_of(workdir), setup.ends)
        if status != -signal.SIGKILL and "with signal 9" not in output:
            return [f"a run that nobody killed stopped: {output[-2000:]}"]
        stage = [s for s in STAGES if (workdir / s).exists()][-1:]
        kills[
            f"{(stage or ['before the first'])[0]}, processes: {setup.processes}"
        ] += 1


def report(count: int, workers: int = 2, processes: tuple[int, ...] = (1, 2)) -> dict:
    """Kill `count` times in all: where and how, how often, and which ends differ."""
    begin, kills, faults = time.monotonic(), collections.Counter(), []
    seeds = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        write_face_config(folder)
        for i, number in enumerate(processes, 1):
            setup = set_up(folder, number)
            goal = count * i // len(processes)
            is_enough = lambda goal=goal: sum(kills.values()) >= goal

            def run_chains(_, setup=setup, is_enough=is_enough):
                while not is_enough():
                    seed = next(seeds)
                    found = chain(setup, seed, is_enough, kills)
                    faults.extend(f"run {seed}: {what}" for what in found)
                    so_far = f"{sum(kills.values())} kills, {len(faults)} differences"
                    print(f"run {seed} has ended; so far {so_far}", flush=True)

            with concurrent.futures.ThreadPoolExecutor(workers) as pool:
                list(pool.map(run_chains, range(workers)))
    return {
        "table": dict(sorted(kills.items())),
        "findings": faults,
        "seconds": round(time.monotonic() - begin),
    }
