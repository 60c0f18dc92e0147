"""What FedMargin's prototypes cost: rounds of FedAvg and of FedMargin, in turns.

    python experiments/benchmarks/fedmargin.py [--clients=8] [--epochs=4] [--rounds=8]

Clients of 100 images of 28 pixels in batches of 20, or of 20 images of 48 x 64 pixels
with a class each, 10 classes, one device. FedMargin sees every image two more times,
forward only, beside the three passes' worth of every epoch. Prints seconds of the
process a round, which a busy machine changes less, and the ratio.
"""

import argparse
import statistics
import time
from typing import NamedTuple

import results_file

CLASSES = 10
SMALL = {"widths": (16, 32), "num_classes": CLASSES}


class Work(NamedTuple):
    """What a client trains on."""

    shape: tuple[int, ...]  # of an image
    count: int  # images of a client
    settings: dict  # of the network


WORK = {
    "cnn": Work((28, 28, 1), 100, SMALL),
    "resnet": Work((28, 28, 1), 100, {"blocks": (1, 1), **SMALL}),
    "segmenter": Work(
        (48, 64, 3),
        20,
        {
            "encoder": {"name": "resnet", "blocks": (1, 1, 1), "widths": (16, 32, 64)},
            "num_classes": CLASSES,
        },
    ),
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    results_file.add_flag(parser)
    return parser.parse_args()


def runs_of(name, args):
    """{algorithm: (simulation, server, store)} of the same work."""
    import jax
    import numpy as np

    from fedfr_jax.data.batching import Batching
    from fedfr_jax.federated.algorithms import ALGORITHMS
    from fedfr_jax.federated.client import Population
    from fedfr_jax.federated.simulation import (
        build_simulation,
        open_store,
        start_simulation,
    )
    from fedfr_jax.mesh import make_mesh
    from fedfr_jax.models import MODELS as FACTORIES
    from fedfr_jax.tasks.classification.loss import cross_entropy
    from fedfr_jax.tasks.segmentation.loss import pixel_cross_entropy
    from fedfr_jax.types import Dataset, LocalTraining

    work = WORK[name]
    random, count = np.random.default_rng(0), work.count * args.clients
    images = random.normal(size=(count, *work.shape)).astype(np.float32)
    draw = lambda *shape: random.integers(CLASSES, size=(count, *shape))
    dataset = Dataset.from_arrays(images, draw().astype(np.int32))
    loss_of = cross_entropy
    if name == "segmenter":
        mask = draw(*work.shape[:2]).astype(np.uint8)
        dataset = dataset._replace(targets={**dataset.targets, "mask": mask})
        loss_of = pixel_cross_entropy
    offsets = np.arange(0, count + 1, work.count)
    model = FACTORIES[name](work.shape, **work.settings)
    local = LocalTraining(loss_of(model), learning_rate=0.01)
    runs = {}
    for method, options in (("fedavg", {}), ("fedmargin", {"model": model})):
        sim = build_simulation(
            ALGORITHMS[method](local, **options),
            Batching(20),
            dataset,
            Population(offsets, np.full(args.clients, CLASSES)),
            mesh=make_mesh(1),
            local_epochs=args.epochs,
        )
        server = start_simulation(sim, model.init(jax.random.key(0)))
        runs[method] = sim, server, open_store(sim, server)
    return runs


def seconds_of(runs, rounds):
    """{algorithm: CPU seconds of each round}, but for the first two, which compile."""
    import jax

    from fedfr_jax.federated.simulation import simulate_round

    spent = {method: [] for method in runs}
    for round in range(rounds + 2):
        for method, (sim, server, store) in runs.items():
            begin = time.process_time()
            server, _ = simulate_round(sim, server, store, round)
            jax.block_until_ready(server)
            spent[method].append(time.process_time() - begin)
            runs[method] = sim, server, store
    return {method: times[2:] for method, times in spent.items()}


def main():
    """Print and write the seconds and the ratio of every network."""
    args, rows = parse_arguments(), {}
    for name in WORK:
        spent = seconds_of(runs_of(name, args), args.rounds)
        pairs = zip(spent["fedavg"], spent["fedmargin"], strict=True)
        row = {k: statistics.median(times) for k, times in spent.items()}
        row["median of pairs"] = statistics.median(b / a for a, b in pairs)
        row["of the fastest"] = min(spent["fedmargin"]) / min(spent["fedavg"])
        rows[f"{name}, {args.epochs} epochs"] = row
        print(name, {key: round(value, 3) for key, value in row.items()}, flush=True)
    results_file.write(args.out, rows)


if __name__ == "__main__":
    main()
