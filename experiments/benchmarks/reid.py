"""A client's step of re-identification, beside the same step as a PyTorch loop.

    python experiments/benchmarks/reid.py [--steps=6] [--rounds=3] [--repeats=3]

Four clients, a ResNet of four basic blocks (64 to 512 channels) with a bottleneck of
512, images of 128 x 64, batches of 32, two threads each. The two run in turns, each in
a process of its own; what counts is the fastest round of each, and their ratio. Not for
a machine that does other work meanwhile.
"""

import argparse
import json
import pathlib
import sys
import time

import environments
import results_file
import turns

HERE = pathlib.Path(__file__).resolve().parent
WORK = {"clients": 4, "batch": 32, "classes": 150, "neck_dim": 512}
SHAPE, WIDTHS = (128, 64), (64, 128, 256, 512)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ours", type=int, default=0, help="lanes: a child's work")
    results_file.add_flag(parser)
    return parser.parse_args()


def ours(args) -> float:
    """Seconds of a client's step in the fastest of some rounds."""
    import jax
    import numpy as np

    from fedfr_jax.data.batching import Batching
    from fedfr_jax.federated.algorithms import ALGORITHMS
    from fedfr_jax.federated.algorithms.personal import with_personal_layers
    from fedfr_jax.federated.client import Population
    from fedfr_jax.federated.local import sgd
    from fedfr_jax.federated.simulation import (
        build_simulation,
        open_store,
        simulate_round,
        start_simulation,
    )
    from fedfr_jax.mesh import make_mesh
    from fedfr_jax.models import MODELS
    from fedfr_jax.tasks.reid.loss import reid_loss
    from fedfr_jax.types import Dataset, LocalTraining

    random, clients = np.random.default_rng(0), WORK["clients"]
    each = args.steps * WORK["batch"]
    images = random.normal(size=(clients * each, *SHAPE, 3)).astype(np.float32)
    labels = random.integers(WORK["classes"], size=len(images)).astype(np.int32)
    model = MODELS["reid"](
        (*SHAPE, 3),
        **{"num_classes": WORK["classes"], "neck_dim": WORK["neck_dim"]},
        **{"depth": 18, "blocks": (1, 1, 1, 1), "widths": WIDTHS, "dropout": 0.0},
    )
    local = LocalTraining(reid_loss(model), sgd(momentum=0.9, nesterov=True), 0.05)
    sim = build_simulation(
        with_personal_layers(ALGORITHMS["fedavg"](local), "params/classifier/"),
        *(Batching(WORK["batch"]), Dataset.from_arrays(images, labels)),
        Population(
            np.arange(0, len(images) + 1, each), np.full(clients, WORK["classes"])
        ),
        **{"mesh": make_mesh(1), "clients_per_device": args.ours},
    )
    server = start_simulation(sim, model.init(jax.random.key(0)))
    store, spent = open_store(sim, server), []
    for round in range(args.rounds + 1):
        begin = time.perf_counter()
        server, _ = simulate_round(sim, server, store, round)
        jax.block_until_ready(server)
        spent.append(time.perf_counter() - begin)
    return min(spent[1:]) / (clients * args.steps)


def of_torch(args) -> list[str]:
    """The command of the PyTorch loop."""
    flags = [f"--{k}={v}" for k, v in WORK.items()]
    flags += [f"--steps={args.steps}", f"--rounds={args.rounds}"]
    flags += ["--widths", *map(str, WIDTHS), "--size", *map(str, SHAPE)]
    python = environments.python_of("torch")
    return [python, str(HERE / "peer_torch_reid.py"), *flags]


def main():
    """Print and write the seconds of a step, and ours over PyTorch's."""
    args = parse_arguments()
    if args.ours:
        print(json.dumps({"seconds": ours(args)}))
        return
    given = [f"--steps={args.steps}", f"--rounds={args.rounds}"]
    lanes = lambda count: [sys.executable, __file__, f"--ours={count}", *given]
    commands = {"torch": of_torch(args), "1 lane": lanes(1), "4 lanes": lanes(4)}
    row = turns.fastest(commands, args.repeats)
    best = min(row["1 lane"], row["4 lanes"])
    row["ours over torch"] = best / row["torch"]
    print({name: round(value, 3) for name, value in row.items()})
    results_file.write(args.out, {"local step": row})


if __name__ == "__main__":
    main()
