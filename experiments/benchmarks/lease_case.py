"""One case of lease.py: a row of JSON for every cell that it measures.

    python experiments/benchmarks/lease_case.py emnist [--smoke]

parity: the loss of three rounds on this device and on the CPU, all products in float32.
emnist, resnet18, iresnet50: seconds of a whole round, host included, for lanes (clients
trained at once), bfloat16 or float32 (TF32 where the device has it) and forms
of convolutions, the most telling first; `gib` is what the compiler sets aside.
Cells of steps_per_loop 1 have no counted loops, which "auto" takes on a GPU; those with
rounds_per_call above 1 play that many rounds in one call.
emnist_sizes: the same with clients of unequal size, which take loops of two lengths.
cifar10: BlazeFL's benchmark, of which five rounds are the job: `job_seconds`.
iresnet50 also has one data-parallel network with the same total batch.
r50_93k, r100_93k: a central step with CosFace over 93,431 classes; MFU counts 6
operations per multiply-add of backbone and classes, nothing that is computed again.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import types
from typing import NamedTuple

import bigface_gpu
import jax
import jax.numpy as jnp
import numpy as np
import ours
import workloads
from gpu_references import data_parallel, first_line
from lease_works import (
    EMBEDDING,
    SMOKE_EMBEDDING,
    WORKS,
    size_of,
    sizes_of,
    work_of,
)

from fedfr_jax.convolutions import use_forms
from fedfr_jax.data.augment import normalize
from fedfr_jax.federated import simulation as simulations
from fedfr_jax.federated.one_round import assign, load_round
from fedfr_jax.federated.pipeline import CohortRows
from fedfr_jax.federated.rounds import advance
from fedfr_jax.federated.sampling import sample_cohort
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models import MODELS
from fedfr_jax.types import Cohort

ROUNDS = 3  # timed, after one that is not
PARITY_ROUNDS, PARITY_CLIENTS = 3, 4
JOB_ROUNDS = 5  # of BlazeFL's benchmark
STEPS = ("r50_93k", "r100_93k")


class Cell(NamedTuple):
    """How a round is computed."""

    lanes: int
    dtype: str = "float32"  # of the convolutions
    forms: str = "gpu"  # of convolutions and pooling, see `convolutions.FORMS`
    # Of counted local loops; 1: none.
    steps_per_loop: int | tuple[int, ...] | str = "auto"
    rounds_per_call: int = 1


BF16 = "bfloat16"
CELLS = {
    "emnist": (
        Cell(64),
        Cell(64, steps_per_loop=1),
        Cell(64, rounds_per_call=10),
        Cell(64, BF16),
        Cell(256),
        Cell(16),
        Cell(64, forms="cpu"),
        Cell(64, forms="xla"),
        Cell(256, BF16, "cpu"),
        Cell(1),
    ),
    "emnist_sizes": (
        Cell(64),
        Cell(64, steps_per_loop=1),
        Cell(64, steps_per_loop=2),
        Cell(64, steps_per_loop=(16, 4, 1)),
    ),
    "cifar10": (
        Cell(100, rounds_per_call=5),
        Cell(100),
        Cell(25, rounds_per_call=5),
        Cell(100, BF16, rounds_per_call=5),
    ),
    "resnet18": (
        Cell(8, BF16),
        Cell(8, BF16, steps_per_loop=1),
        Cell(1, BF16),
        Cell(1, BF16, steps_per_loop=1),
        Cell(32, BF16),
        Cell(8),
        Cell(8, BF16, "cpu"),
    ),
    "iresnet50": (Cell(1, BF16), Cell(4, BF16), Cell(4, BF16, "cpu"), Cell(1)),
}
SMOKE_CELLS = (
    Cell(2, BF16, "cpu", steps_per_loop=(2, 1)),
    Cell(2, forms="cpu", rounds_per_call=2),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=("parity", "parity_loss", *STEPS, *WORKS))
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU")
    args = parser.parse_args()
    if args.case == "parity":
        rows = parity(args.smoke)
    elif args.case == "parity_loss":
        rows = [{"loss": parity_loss()}]
    elif args.case in STEPS:
        rows = central_step(args.case, args.smoke)
    else:
        rows = rounds(args.case, args.smoke)
    for row in rows:
        print(json.dumps(row), flush=True)


def rounds(name: str, is_smoke: bool):
    """A row per cell, then what it is compared with."""
    work = work_of(name, is_smoke)
    data = make_data(work)
    for cell in SMOKE_CELLS if is_smoke else CELLS[name]:
        with use_forms(cell.forms):
            figures = measure(name, work, data, cell)
        yield {"system": "ours", **cell._asdict(), **figures}
    if name == "iresnet50":
        settings = network_settings(name, work, is_smoke) | {"dtype": jnp.bfloat16}
        yield data_parallel(work, settings, data, ROUNDS)


def make_data(work: workloads.Workload) -> workloads.Data:
    """The workload's own; bytes for the faces, whose images are large."""
    if work.model != "iresnet":
        return workloads.make_data(work)
    random = np.random.default_rng(0)
    shape = (work.population, work.examples)
    images = random.integers(0, 256, (*shape, *work.input_shape), np.uint8)
    labels = random.integers(0, work.num_classes, shape, np.int32)
    return workloads.Data(images, labels, images[0], labels[0])


def network_settings(name: str, work: workloads.Workload, is_smoke: bool) -> dict:
    """Of the factory of the work's network."""
    if name == "cifar10":  # twice the operations of BlazeFL's two 5x5 convolutions
        return {"widths": (6, 16), "embedding_dim": 120}
    if work.model == "cnn":
        return {}
    blocks, widths = size_of(name, is_smoke)
    if work.model == "resnet":
        return {"blocks": blocks, "widths": widths, "num_classes": work.num_classes}
    dim = SMOKE_EMBEDDING if is_smoke else EMBEDDING
    return {"blocks": blocks, "widths": widths, "embedding_dim": dim}


def build(name: str, work: workloads.Workload, data, cell: Cell):
    """(simulation, server) of a cell."""
    is_smoke = work != WORKS[name]
    settings = network_settings(name, work, is_smoke)
    settings["dtype"] = None if cell.dtype == "float32" else cell.dtype
    model = MODELS[work.model](work.input_shape, **settings)
    algorithm, variables, logits, feed = ours.classifier(work, model)
    if data.images.dtype == np.uint8:
        feed = feed._replace(augment=normalize())
    options = {
        "clients_per_device": cell.lanes,
        "mesh": make_mesh(1),
        "steps_per_loop": cell.steps_per_loop,
        "sizes": sizes_of(name, work),
    }
    return ours.build(work, data, (algorithm, variables, logits, feed), **options)[:2]


def compiled_round(sim, server):
    """(compiled call, play(server, round) -> (server, metrics))."""
    store = simulations.open_store(sim, server)

    def arguments(server, round):
        sizes = len(sim.population.num_classes), sim.settings.cohort_size
        ids = sample_cohort(0, round, *sizes)
        rows = CohortRows(store, round, lambda number: None)
        work = assign(sim, server, [Cohort(ids, round)], rows)
        loaded = load_round(sim.runs, [work], round)
        ((rows, slots, table),) = loaded.segments
        return server, rows, slots, loaded.order, table, loaded.constants

    call = sim.programs.run_whole.lower(*arguments(server, 0)).compile()

    def play(server, round):
        server, rows, metrics = call(*arguments(server, round))
        fetched = jax.device_get((rows, metrics))
        return jax.block_until_ready(server), fetched[1]

    return call, play


def compiled_call(sim, server, num_rounds: int):
    """`compiled_round` of `num_rounds` rounds in one call."""
    store = simulations.open_store(sim, server)

    def play(server, turn):
        first = turn * num_rounds
        server, (logs,) = advance(sim.runs, server, [store], first, num_rounds)
        return jax.block_until_ready(server), logs[-1].metrics

    play(server, 0)  # compiles
    (needs,) = sim.programs.run_rounds.needs.values()
    return needs, play


def measure(name: str, work: workloads.Workload, data, cell: Cell) -> dict:
    """Figures of a cell; what does not fit the memory is a failure."""
    start = time.perf_counter()
    try:
        sim, server = build(name, work, data, cell)
        if cell.rounds_per_call > 1:
            needs, play = compiled_call(sim, server, cell.rounds_per_call)
        else:
            call, play = compiled_round(sim, server)
            needs = call.memory_analysis()
        compiled, spent = time.perf_counter() - start, []
        for round in range(1 + ROUNDS):
            start = time.perf_counter()
            server, metrics = play(server, round)
            spent.append(time.perf_counter() - start)
    except jax.errors.JaxRuntimeError as error:
        return {"failure": first_line(error)}
    seconds = statistics.median(spent[1:]) / cell.rounds_per_call
    return {
        "seconds": seconds,
        "clients_per_second": work.cohort / seconds,
        "images_per_second": work.cohort * work.examples * work.epochs / seconds,
        "compile_seconds": compiled,
        "gib": needs.temp_size_in_bytes / 2**30,
        "loss": float(metrics["loss"].mean()),
        **({"job_seconds": JOB_ROUNDS * seconds} if name == "cifar10" else {}),
    }


def central_step(name: str, is_smoke: bool):
    """Images per second and MFU of a big face network."""
    case = bigface_gpu.SMOKE["smoke"] if is_smoke else bigface_gpu.CASES[name]
    args = types.SimpleNamespace(smoke=is_smoke, steps=8, rounds=2)
    args.peak = bigface_gpu.PEAK
    found, _ = bigface_gpu.measured(args, case)
    if found.get("peak_bytes"):
        found["gib"] = found.pop("peak_bytes") / 2**30
    yield {"system": "ours", "dtype": BF16, "forms": "gpu", **found}


def parity(is_smoke: bool):
    """Two rows: the loss here and on the CPU, and how far they are apart."""
    del is_smoke  # it is small
    here = parity_loss()
    command = [sys.executable, __file__, "parity_loss"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    out = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout
    there = json.loads(out.splitlines()[-1])["loss"]
    row = {"dtype": "float32", "clients_per_device": 2}
    yield {"system": jax.default_backend(), **row, "loss": here}
    apart = abs(here - there) / there
    yield {"system": "cpu", **row, "loss": there, "relative_difference": apart}


def parity_loss() -> float:
    """Mean loss of the third round of FedAvg on few clients."""
    jax.config.update("jax_default_matmul_precision", "highest")
    work = workloads.everyone(WORKS["emnist"], PARITY_CLIENTS)
    sim, server = build("emnist", work, make_data(work), Cell(2))
    _, play = compiled_round(sim, server)
    for round in range(PARITY_ROUNDS):
        server, metrics = play(server, round)
    return float(metrics["loss"].mean())


if __name__ == "__main__":
    main()
