"""The federated work of lease.py, the same for this engine and for PyTorch; no JAX."""

import numpy as np
from workloads import Workload

# Local training without momentum; every client takes part in every round.
WORKS = {
    "emnist": Workload(
        "cnn", (28, 28, 1), 62, 1024, 1024, 40, 20, rate=0.2, noise=0.25
    ),
    # As many images as EMNIST's writers have on average, see `sizes_of`.
    "emnist_sizes": Workload(
        "cnn", (28, 28, 1), 62, 1024, 1024, 200, 20, rate=0.2, noise=0.25
    ),
    # BlazeFL's benchmark (https://github.com/blazefl/blazefl): 100 clients, 5 epochs.
    "cifar10": Workload("cnn", (32, 32, 3), 10, 100, 100, 500, 50, epochs=5),
    "resnet18": Workload("resnet", (32, 32, 3), 10, 64, 64, 64, 32),
    "iresnet50": Workload("iresnet", (112, 112, 3), 100, 8, 8, 64, 32),
}
SMOKE = {
    "emnist": Workload("cnn", (28, 28, 1), 62, 8, 8, 40, 20, rate=0.2, noise=0.25),
    "emnist_sizes": Workload("cnn", (28, 28, 1), 62, 8, 8, 20, 4, noise=0.25),
    "cifar10": Workload("cnn", (16, 16, 3), 10, 4, 4, 8, 4),
    "resnet18": Workload("resnet", (16, 16, 3), 10, 4, 4, 8, 4),
    "iresnet50": Workload("iresnet", (16, 16, 3), 10, 4, 4, 8, 4),
}
# (blocks of a stage, their channels) of the residual networks
SIZES = {
    "resnet18": ((2, 2, 2, 2), (64, 128, 256, 512)),
    "iresnet50": ((3, 4, 14, 3), (64, 128, 256, 512)),
}
SMOKE_SIZES = {"resnet18": ((1, 1), (8, 16)), "iresnet50": ((1, 1), (8, 16))}
EMBEDDING, SMOKE_EMBEDDING = 512, 16  # of the IResNet


def work_of(name: str, is_smoke: bool) -> Workload:
    """The work of a case."""
    return (SMOKE if is_smoke else WORKS)[name]


def sizes_of(name: str, work: Workload) -> np.ndarray:
    """Images of each client, [N]: the same of all, or as unequal as EMNIST's writers.

    Those have 227 on average with a deviation of 89 (LEAF, arXiv:1812.01097, table 1).
    """
    if name != "emnist_sizes":
        return np.full(work.population, work.examples)
    drawn = np.random.default_rng(0).normal(1, 89 / 227, work.population)
    drawn = np.clip(drawn, 0.1, 2)
    total = work.population * work.examples
    return (drawn / drawn.sum() * total).astype(np.int64)


def size_of(name: str, is_smoke: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(blocks, widths) of a case's residual network."""
    return (SMOKE_SIZES if is_smoke else SIZES)[name]
