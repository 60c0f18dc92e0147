"""How long a round's first call takes to trace and compile, network by network.

    python experiments/benchmarks/compile_time.py [--networks=iresnet18,iresnet50]
        [--methods=fedavg,fedfr] [--unrolled] [--in-turn] [--repeats=3] [--out=FILE]

Nothing is trained: rounds are lowered from shapes at 112 pixels with 64 images a step,
for a device per core, and FedFR's beside what it prepares (features and hard negatives,
here one program), as in a run. XLA compiles on several threads, so on a busy machine
the CPU seconds say more than the clock's.

Equal blocks are scanned, so depth costs nothing: see iresnet1200 in the table.
"""

import argparse
import itertools
import os
import pathlib
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import jax
import numpy as np
import results_file

from fedfr_jax import mesh
from fedfr_jax.config.build import sections
from fedfr_jax.distributed import use_every_core
from fedfr_jax.federated.engine import compiler_options
from fedfr_jax.plan.aot import stage_programs
from fedfr_jax.plan.dummy_inputs import without_files
from fedfr_jax.plan.shapes import stage_shapes
from fedfr_jax.tasks import TASKS
from fedfr_jax.types import Cohort

NETWORKS = {
    "sphereface20": {"name": "sphereface", "depth": 20},
    "sphereface64": {"name": "sphereface", "depth": 64},
    "iresnet18": {"name": "iresnet", "depth": 18},
    "iresnet34": {"name": "iresnet", "depth": 34},
    "iresnet50": {"name": "iresnet", "depth": 50},
    "iresnet100": {"name": "iresnet", "depth": 100},
    "iresnet1200": {"name": "iresnet", "depth": 1200},
}
METHODS = {
    "fedavg": {
        "algorithm": {
            "name": "fedfr",
            "use_public_data": False,
            "contrastive_weight": 0.0,
            "branch": None,
        }
    },
    "fedfr": {},
}
SPLIT = {
    "num_clients": 4,
    "ids_per_client": 100,
    "num_public_ids": 600,
    "num_unseen_ids": 2,  # the least that can be judged
}
SIZE, BATCH = 112, 64
MEMORY = 10**12  # bytes of a device: more than is asked for


def main():
    """Print a table, and write it as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--networks", default=",".join(list(NETWORKS)[:5]))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--unrolled", action="store_true", help="without scans")
    parser.add_argument("--in-turn", action="store_true", help="one after the other")
    parser.add_argument("--repeats", type=int, default=3, help="of all rows, in turns")
    results_file.add_flag(parser)
    arguments = parser.parse_args()
    rows = itertools.product(
        arguments.networks.split(","), arguments.methods.split(",")
    )
    found = {row: [] for row in rows}
    settings = {"scan": not arguments.unrolled, "in_turn": arguments.in_turn}
    # Each in a process of its own: what others leave behind slows a compiler down.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as fresh:
        for row in [*found] * arguments.repeats:
            found[row].append(fresh.submit(time_round, *row, **settings).result())
            print(*row, found[row][-1], flush=True)
    print(f"{'network':14} {'method':8} {'fastest':>8} {'median':>8} {'CPU s':>7}")
    for (network, method), times in found.items():
        every = {name: [time[name] for time in times] for name in times[0]}
        seconds, spent = every["seconds"], every["user_cpu_seconds"]
        print(
            f"{network:14} {method:8} {min(seconds):8.1f} "
            f"{statistics.median(seconds):8.1f} {statistics.median(spent):7.1f}"
        )
        name = f"{network} {method}{' unrolled' if arguments.unrolled else ''}"
        name += " in turn" if arguments.in_turn else ""
        row = {**every, "pixels": SIZE, "batch": BATCH}
        results_file.write(arguments.out, {name: row})


def time_round(
    network: str, method: str, *, scan: bool, in_turn: bool
) -> dict[str, float]:
    """Seconds to trace and to compile all that the first round calls, of the clock, of
    all cores, and those that other virtual machines took of them meanwhile.
    """
    use_every_core()  # before JAX first asks for devices
    experiment = rounds(network, method, scan)
    user, lost = os.times().user, stolen()
    begin = time.perf_counter()
    with mesh.use_described(jax.devices(), memory=MEMORY):
        program = stage_programs(experiment, method)["round"]
    with ThreadPoolExecutor(1) as thread:
        later = thread.submit(program.compile)
        if in_turn:
            later.result()
        if experiment.stages[method].trainer.algorithm.prepare:
            prepared(experiment, method).compile()
        later.result()
    return {
        "seconds": round(time.perf_counter() - begin, 2),
        "user_cpu_seconds": round(os.times().user - user, 2),
        "stolen_seconds": round(stolen() - lost, 2),
    }


def rounds(network: str, method: str, scan: bool):
    """The experiment of a method, whose images nobody reads."""
    model = {**NETWORKS[network], "scan": scan}
    settings = {
        "data": {"name": "recordio", "path": "faces_emore", "image_size": SIZE},
        "partition": {"name": "ms1m", **SPLIT},
        "model": model,
        "pretrain": {"batch_size": BATCH},
        "federation": {"batch_size": BATCH, "local_epochs": 1},
        "methods": {method: METHODS[method]},
    }
    unseen = without_files(sections(settings), say=str)
    federation = {**unseen["federation"], "data_placement": "device"}
    settings = {**unseen, "model": model, "federation": federation}
    with mesh.use_described(jax.devices(), memory=MEMORY):
        return TASKS["faces"](settings)  # convolutions as a run has them


def stolen() -> float:
    """Seconds that other virtual machines took of all cores so far; Linux tells."""
    words = pathlib.Path("/proc/stat").read_text().split("\n")[0].split()
    return int(words[8]) / os.sysconf("SC_CLK_TCK")


def prepared(experiment, method: str) -> jax.stages.Lowered:
    """What FedFR computes before its clients train."""
    shapes = stage_shapes(experiment, method)
    sim, trainer = shapes.sim, experiment.stages[method].trainer
    context = sim.context(Cohort(np.arange(sim.settings.cohort_size), 0))
    prepare = lambda server, dataset: trainer.algorithm.prepare(
        server, context._replace(dataset=dataset)
    )
    options = compiler_options(experiment.mesh, None)  # as when it is called
    asked = jax.jit(prepare, compiler_options=options)
    return asked.lower(shapes.server, sim.device_data)


if __name__ == "__main__":
    main()
