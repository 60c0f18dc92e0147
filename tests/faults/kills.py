"""Runs that are killed at any moment end with the bits of one that nobody stopped.

An experiment of three stages (pretraining, FedAvg, FedFR) with a checkpoint every third
epoch and round is started again and again, and killed each time just before a random
change of a file in its folder. When it has reached its end, everything that it leaves
but the seconds is compared with an uninterrupted run's.
"""

import collections
import concurrent.futures
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

ROOT = pathlib.Path(__file__).parent.parent.parent
INJECT = pathlib.Path(__file__).parent / "inject"
STAGES = ("pretrained", "fedavg", "fedfr")
VERSIONS = 3  # of a row in a store
CONFIG = '''"""Three short stages with a checkpoint every third epoch and round."""

from configs import base


def get_config():
    config = base.get_config()
    config.data = {"name": "arrays", "path": "PATH"}
    config.partition = {
        "num_clients": 4,
        "ids_per_client": 2,
        "num_public_ids": 6,
        "num_unseen_ids": 6,
    }
    config.model = {
        "name": "sphereface",
        "blocks": (0, 0),
        "widths": (4, 8),
        "embedding_dim": 8,
    }
    config.pretrain = {
        "epochs": 7,
        "batch_size": 8,
        "learning_rate": 0.05,
        "checkpoint_every": 3,
    }
    config.federation = {
        "rounds": 8,
        "local_epochs": 1,
        "batch_size": 8,
        "cohort_size": 3,
        "checkpoint_every": 3,
    }
    config.evaluation = {"batch_size": 8, "fars": (0.1,), "fpirs": (0.5,)}
    return config.lock()
'''


class Setup(NamedTuple):
    """An experiment on `processes` processes and what it ends with."""

    folder: pathlib.Path
    processes: int
    events: tuple[int, ...]  # changes of files, of each process
    ends: dict


def write_experiment(folder: pathlib.Path) -> None:
    """Put data and config below `folder`."""
    rng = np.random.default_rng(0)
    centers = rng.uniform(60, 190, size=(20, 1, 12, 12, 1))
    images = centers + rng.normal(scale=30, size=(20, 8, 12, 12, 1))
    images = images.clip(0, 255).astype(np.uint8).reshape(-1, 12, 12, 1)
    np.savez(folder / "faces.npz", images=images, labels=np.repeat(np.arange(20), 8))
    configs = folder / "configs"
    configs.mkdir()
    (configs / "base.py").write_text((ROOT / "configs" / "base.py").read_text())
    path = str(folder / "faces.npz")
    (configs / "tiny.py").write_text(CONFIG.replace("PATH", path))


def start(
    folder: pathlib.Path,
    workdir: pathlib.Path,
    processes: int,
    *,
    least_compiled: float = 1e9,
    **faults,
):
    """Start or go on under `workdir`; `faults` are variables of sitecustomize.

    A program that took `least_compiled` seconds is kept for later starts.
    """
    devices = 2 // processes
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{INJECT}{os.pathsep}{ROOT}",
        "XLA_FLAGS": f"{flags} --xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(least_compiled),
        "FEDFR_DATA": "",
        "XDG_CACHE_HOME": str(folder / "cache"),
        **{f"FAULTS_{name.upper()}": str(value) for name, value in faults.items()},
    }
    words = ["train", f"--config={folder / 'configs' / 'tiny.py'}"]
    words += [f"--workdir={workdir}"]
    if processes > 1:
        words = ["launch", f"--processes_per_host={processes}", *words]
    return subprocess.Popen(
        [sys.executable, "-m", "fedfr_jax", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process, timeout=600) -> str:
    """What a process prints; all of its session is gone afterwards."""
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        kill_all(process)


def kill_all(process) -> None:
    """SIGKILL a process and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


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
        for name, leaf in leaves_of(newest).items():
            ends[f"{stage} {name}"] = (leaf.dtype, leaf.shape, leaf.tobytes())
        if (folder / "store").exists():
            ends[f"{stage} store"] = rows_of(folder / "store")
    return ends


def leaves_of(checkpoint: pathlib.Path) -> dict[str, np.ndarray]:
    """Arrays of a checkpoint, wherever they were written."""
    with ocp.PyTreeCheckpointer() as reader:
        names = reader.metadata(checkpoint).item_metadata.tree
        kinds = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        return reader.restore(checkpoint, restore_args=kinds)


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
    """The uninterrupted run, twice: the first fills the cache of compiled programs."""
    workdirs = [folder / f"whole{processes}-{i}" for i in range(2)]
    logs = [folder / f"events{processes}-{i}" for i in range(processes)]
    finish(start(folder, workdirs[0], processes, least_compiled=0))
    output = finish(start(folder, workdirs[1], processes))
    for i, log in enumerate(logs):
        workdir = folder / f"counted{processes}-{i}"
        faults = {"root": workdir, "kill": 0, "log": log}
        if processes > 1:
            faults["process"] = i
        output = finish(start(folder, workdir, processes, **faults))
    if not (workdirs[1] / "summary.json").exists():
        raise RuntimeError(f"the uninterrupted run must end, got {output[-3000:]}")
    ends = ends_of(workdirs[0])
    if different(ends, ends_of(workdirs[1])):
        raise RuntimeError("two uninterrupted runs must end with the same bits")
    events = tuple(len(log.read_text().splitlines()) for log in logs)
    return Setup(folder, processes, events, ends)


def different(ends: dict, expected: dict) -> list[str]:
    """Names of what is not the same."""
    names = ends.keys() | expected.keys()
    return sorted(name for name in names if ends.get(name) != expected.get(name))


def chain(setup: Setup, seed: int, is_enough, kills: collections.Counter) -> list[str]:
    """Kill and start a run until it ends; what differs then, or what it said."""
    rng = random.Random(seed)
    workdir = setup.folder / f"chain{setup.processes}-{seed}"
    while True:
        process = doomed(setup, workdir, rng, is_free=is_enough())
        output = finish(process)
        if process.returncode == 0:
            break
        if process.returncode != -signal.SIGKILL and "with signal 9" not in output:
            return [f"a run that nobody killed stopped: {output[-2000:]}"]
        stage = [s for s in STAGES if (workdir / s).exists()][-1:]
        kills[(setup.processes, *(stage or ["before the first"]))] += 1
    return different(ends_of(workdir), setup.ends)


def doomed(setup: Setup, workdir, rng, *, is_free: bool):
    """The next start, which is killed at a change of a file unless it is free."""
    faults = {}
    if not is_free:
        number = rng.randrange(setup.processes)
        # The first events of a resumed run as often as those of all three stages.
        most = rng.choice((60, setup.events[number]))
        faults = {"root": workdir, "kill": rng.randrange(1, most + 1)}
        if setup.processes > 1:
            faults["process"] = number
    return start(setup.folder, workdir, setup.processes, **faults)


def report(count: int, workers: int = 2, processes: tuple[int, ...] = (1, 2)) -> dict:
    """Kill `count` times in all: where and how, how often, and which ends differ."""
    begin, kills, faults = time.monotonic(), collections.Counter(), []
    seeds = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        write_experiment(folder)
        for i, number in enumerate(processes, 1):
            setup = set_up(folder, number)
            goal = count * i // len(processes)
            is_enough = lambda goal=goal: sum(kills.values()) >= goal

            def run_chains(setup=setup, is_enough=is_enough):
                while not is_enough():
                    seed = next(seeds)
                    found = chain(setup, seed, is_enough, kills)
                    faults.extend(f"run {seed}: {what}" for what in found)
                    so_far = f"{sum(kills.values())} kills, {len(faults)} differences"
                    print(f"run {seed} has ended; so far {so_far}", flush=True)

            with concurrent.futures.ThreadPoolExecutor(workers) as pool:
                for done in [pool.submit(run_chains) for _ in range(workers)]:
                    done.result()
    table = {
        f"{stage}, processes: {number}": times
        for (number, stage), times in sorted(kills.items())
    }
    for name, times in table.items():
        print(f"{name}: {times}")
    print(*faults, sep="\n")
    total, seconds = sum(kills.values()), round(time.monotonic() - begin)
    print(f"{total} kills, {len(faults)} differences, {seconds} s", flush=True)
    return {"table": table, "findings": faults, "seconds": seconds}
