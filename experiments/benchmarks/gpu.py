"""This engine on one accelerator: beside PyTorch, and what the client axis costs.

    python experiments/benchmarks/gpu.py [--parts=clients,iresnet] [--profile=FOLDER]
        [--torch-python=PATH] [--lanes=1,4,16,64] [--implementations=xla,im2col]
    python experiments/benchmarks/gpu.py --smoke    # tiny, on a CPU, in seconds

clients: emnist_cnn and cifar_cnn, 1,024 clients in every round, float32 (TF32 where the
device has it), over the PyTorch loop on the same device; the goal is 20x. The loop is
run by PATH, or by this interpreter when it has torch; otherwise its rows are missing.
iresnet: IResNet-18 at 112 pixels, bfloat16, 64 clients x batch 64, images per second
over those of one data-parallel network with the same total batch (halved until it
fits the memory); the goal is 0.9.

Every part is a table of lanes x implementations with seconds per round, host included,
and bytes per lane from the compiler. A row is a JSON line; all go to
results/<device>.json, in place of those of the same parts. --profile traces one round
of each part's fastest row and adds where its time went.
"""

import argparse
import importlib.util
import itertools
import json
import pathlib
import re
import statistics
import sys
import time
from typing import NamedTuple

import device_trace
import jax
import jax.numpy as jnp
import numpy as np
import ours
import results_file
import workloads
from gpu_references import data_parallel, first_line, torch_loop
from run import choice_of

from fedfr_jax.data.augment import normalize
from fedfr_jax.federated import simulation as simulations
from fedfr_jax.federated.sampling import sample
from fedfr_jax.federated.segments import begin
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models import MODELS
from fedfr_jax.models.conv import IMPLEMENTATIONS
from fedfr_jax.types import Cohort

LANES = (1, 4, 16, 64)
GOALS = {"clients": 20.0, "iresnet": 0.9}


class Part(NamedTuple):
    """A table: its work, the network's settings, and what it is compared with."""

    goal: str  # key of GOALS
    work: workloads.Workload
    settings: dict  # of the network's factory
    lanes: tuple[int, ...]


def parts(args) -> dict[str, Part]:
    """What is asked for, by the name of its rows."""
    few = 8 if args.smoke else 1024
    found = {}
    if "clients" in args.parts:
        for name in ("smoke",) if args.smoke else ("emnist_cnn", "cifar_cnn"):
            work = workloads.everyone(workloads.WORKLOADS[name], few)
            found[name] = Part("clients", work, {}, args.lanes or (16, 64, 256))
    if "iresnet" in args.parts:
        size, number = (16, 4) if args.smoke else (112, 64)
        work = workloads.Workload(
            "iresnet",
            (size, size, 3),
            num_classes=100,
            population=number,
            cohort=number,
            examples=4 * number,
            batch_size=number,
        )
        settings = {"depth": 18, "dtype": jnp.bfloat16}
        if args.smoke:
            settings |= {"blocks": (1, 1), "widths": (8, 8), "embedding_dim": 16}
        found["iresnet18"] = Part("iresnet", work, settings, args.lanes or LANES)
    return found


def main():
    args = parse_arguments()
    rows = []
    for name, part in parts(args).items():
        data = make_data(part)
        grid = list(itertools.product(args.implementations, part.lanes))
        own = [measure(name, part, data, *cell, args.rounds) for cell in grid]
        own += reference(name, part, data, args)
        compare(part.goal, own)
        if args.profile:
            best = fastest(own)
            own += [profile(name, part, data, best, args.profile / name)]
        for row in own:
            print(json.dumps(row), flush=True)
        rows += own
        save(rows, args)


def parse_arguments():
    """Flags; lists are given with commas."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny, writes no results")
    parser.add_argument("--parts", type=choice_of(GOALS), default=list(GOALS))
    parser.add_argument(
        "--implementations",
        type=choice_of(IMPLEMENTATIONS),
        default=list(IMPLEMENTATIONS),
    )
    parser.add_argument("--lanes", type=lambda t: tuple(map(int, t.split(","))))
    parser.add_argument("--rounds", type=int, default=3, help="timed, after one")
    parser.add_argument("--torch-python", help="an interpreter that has torch")
    parser.add_argument("--profile", type=pathlib.Path, help="folder of the traces")
    parser.add_argument("--output", type=pathlib.Path, help="default results/<device>")
    args = parser.parse_args()
    if args.smoke:
        args.lanes, args.rounds = args.lanes or (1, 2), 1
    return args


def make_data(part: Part) -> workloads.Data:
    """The workload's own, or bytes where images are large."""
    work = part.work
    if part.goal == "clients":
        return workloads.make_data(work)
    random = np.random.default_rng(0)
    shape = (work.population, work.examples)
    images = random.integers(0, 256, (*shape, *work.image_shape), np.uint8)
    labels = random.integers(0, work.num_classes, shape, np.int32)
    return workloads.Data(images, labels, images[0], labels[0])


def build(part: Part, data, implementation: str, lanes: int):
    """(simulation, server) of one cell."""
    model = MODELS[part.work.model](
        part.work.image_shape, implementation=implementation, **part.settings
    )
    made = ours.classifier(part.work, model)
    if data.images.dtype == np.uint8:
        made = (*made[:3], made[3]._replace(augment=normalize()))
    options = {"lanes": lanes, "mesh": make_mesh(1)}
    return ours.build(part.work, data, made, **options)[:2]


def compiled_round(sim, server):
    """(compiled call, play(call, server, round) -> (server, metrics))."""
    store = simulations.open_store(sim, server)

    def arguments(server, round):
        ids = sample(0, round, len(sim.population.num_classes), sim.cohort_size)
        work = simulations.assign(sim, server, store, Cohort(ids, round))
        begun = begin(sim, [work], round, key=sim.key, hyper=sim.hyper)
        return begun.in_one_call(server)

    def play(call, server, round):
        server, rows, metrics = call(*arguments(server, round))
        fetched = jax.device_get((rows, metrics))
        return jax.block_until_ready(server), fetched[1]

    return sim.programs.whole.lower(*arguments(server, 0)).compile(), play


def measure(
    name, part: Part, data, implementation: str, lanes: int, rounds: int
) -> dict:
    """A row; what does not fit the memory is a row that says so."""
    row = {"part": name, "implementation": implementation, "lanes": lanes}
    begin = time.perf_counter()
    try:
        sim, server = build(part, data, implementation, lanes)
        call, play = compiled_round(sim, server)
        row["compile_seconds"] = time.perf_counter() - begin
        working = call.memory_analysis().temp_size_in_bytes
        row |= {"temporary_bytes": working, "bytes_per_lane": working // lanes}
        spent = []
        for round in range(1 + rounds):
            begin = time.perf_counter()
            server, metrics = play(call, server, round)
            spent.append(time.perf_counter() - begin)
    except jax.errors.JaxRuntimeError as error:
        return {**row, "failure": first_line(error)}
    images = part.work.cohort * part.work.examples * part.work.epochs
    row |= {"seconds_min": min(spent[1:]), "loss": float(metrics["loss"].mean())}
    row["seconds_median"] = statistics.median(spent[1:])
    return {**row, "images_per_second": images / row["seconds_median"]}


def reference(name, part: Part, data, args) -> list[dict]:
    """What the part is compared with: the PyTorch loop, or one network."""
    if part.goal == "iresnet":
        return [
            {"part": name, **data_parallel(part.work, part.settings, data, args.rounds)}
        ]
    python = args.torch_python
    if not python and importlib.util.find_spec("torch"):
        python = sys.executable
    if not python:
        return []
    return [{"part": name, **torch_loop(name, part.work.cohort, python, args.rounds)}]


def fastest(rows: list[dict]) -> dict:
    """This engine's best row.

    Raises:
      RuntimeError: when every cell failed.
    """
    own = [row for row in rows if "lanes" in row and "seconds_median" in row]
    if not own:
        raise RuntimeError(f"one cell at least must run, got {rows}.")
    return min(own, key=lambda row: row["seconds_median"])


def compare(goal: str, rows: list[dict]) -> None:
    """Add `ratio` and `goal` to our best row, where there is something to compare."""
    best, other = fastest(rows), rows[-1]
    if "system" not in other or "seconds_median" not in other:
        return
    if goal == "clients":
        best["ratio"] = other["seconds_median"] / best["seconds_median"]
    else:
        best["ratio"] = best["images_per_second"] / other["images_per_second"]
    best["goal"] = GOALS[goal]


def profile(name, part: Part, data, row: dict, folder: pathlib.Path) -> dict:
    """Trace one warm round of `row`'s cell: -> a row of where its time went."""
    sim, server = build(part, data, row["implementation"], row["lanes"])
    call, play = compiled_round(sim, server)
    server, _ = play(call, server, 0)
    with jax.profiler.trace(str(folder)):
        begin = time.perf_counter()
        play(call, server, 1)
        wall = time.perf_counter() - begin
    found = {"part": name, "profile": str(folder), "seconds": wall}
    return {**found, **device_trace.summary(folder)}


def save(rows: list[dict], args) -> None:
    """Write the rows in place of those of the same parts; a smoke run only if told."""
    device = jax.devices()[0].device_kind
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    path = args.output or results_file.RESULTS / f"{slug}.json"
    if args.smoke and not args.output:
        return
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {row["part"] for row in rows}
    facts = results_file.facts()
    facts["rows"] = [row for row in kept if row["part"] not in new] + rows
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
