"""The federated work of lease.py, the same for this engine and for PyTorch; no JAX."""

from workloads import Workload

# Local training without momentum; every client takes part in every round.
WORKS = {
    "emnist": Workload(
        "cnn", (28, 28, 1), 62, 1024, 1024, 40, 20, rate=0.2, noise=0.25
    ),
    "resnet18": Workload("resnet", (32, 32, 3), 10, 64, 64, 64, 32),
    "iresnet50": Workload("iresnet", (112, 112, 3), 100, 8, 8, 64, 32),
}
SMOKE = {
    "emnist": Workload("cnn", (28, 28, 1), 62, 8, 8, 40, 20, rate=0.2, noise=0.25),
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


def size_of(name: str, is_smoke: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(blocks, widths) of a case's residual network."""
    return (SMOKE_SIZES if is_smoke else SIZES)[name]
