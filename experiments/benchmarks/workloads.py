"""What every system must agree on: the work, the data, the clock, the report.

numpy only, so that it can be imported in every system's environment. Images are a
prototype per class plus noise, in the order in which they are trained on; learning is
visible after a round, and equal work must reach equal accuracy.
"""

import argparse
import json
import os
import pathlib
import time
from typing import NamedTuple

import numpy as np

MARK = "FEDFR_BENCHMARK_RUN"  # in the environment of every process of a run
PREFIX = "RESULT "


class Workload(NamedTuple):
    """Plain SGD on softmax cross entropy, without dropout or augmentation."""

    # mlp: 64 hidden; cnn: 3x3 x 32, 3x3 x 64, pool, 128 hidden; lenet: 5x5 x 6, pool,
    # 5x5 x 16, pool, 120 and 84 hidden; sphereface; vit, a frozen one with LoRA
    model: str
    input_shape: tuple[int, int, int]  # (H, W, C)
    num_classes: int  # M
    population: int  # N
    cohort: int  # K
    examples: int  # per client
    batch_size: int  # B
    epochs: int = 1
    rate: float = 0.1
    noise: float = 1.0  # of a pixel, beside prototypes of deviation 1

    @property
    def steps(self) -> int:
        """Local steps of a whole round."""
        return self.cohort * self.epochs * -(-self.examples // self.batch_size)


WORKLOADS = {
    "mlp_many": Workload("mlp", (28, 28, 1), 10, 2000, 512, 20, 10),
    # Two steps a round have to tell 62 classes apart: less noise, a higher rate.
    "emnist_cnn": Workload(
        "cnn", (28, 28, 1), 62, 500, 32, 40, 20, rate=0.2, noise=0.25
    ),
    "cifar_cnn": Workload("cnn", (32, 32, 3), 10, 500, 50, 50, 10),
    # BlazeFL 3.0's published CIFAR-10 job with its small CNN, 8 of its clients a round.
    "blazefl_cnn": Workload("lenet", (32, 32, 3), 10, 100, 8, 500, 50, epochs=5),
    # FedFR's local step: momentum, weight decay, mirrored and shuffled batches.
    "fedfr_step": Workload("sphereface", (32, 32, 3), 10, 2, 2, 128, 64, 4, 1e-3),
    # A frozen vision transformer with LoRA of rank 8 and a new last layer.
    "vit_lora": Workload("vit", (32, 32, 3), 10, 64, 64, 32, 16),
    # Does a system run at all?
    "smoke": Workload("cnn", (28, 28, 1), 10, 16, 4, 20, 10),
    "smoke_lora": Workload("vit", (16, 16, 3), 10, 4, 4, 4, 2),
    "smoke_face": Workload("sphereface", (32, 32, 3), 10, 2, 2, 16, 8, 2, 1e-3),
}
CLIP_NORM, NOISE_MULTIPLIER = 1.0, 0.5  # of private rounds
MEASURED = ("mlp_many", "emnist_cnn", "cifar_cnn", "blazefl_cnn", "fedfr_step")
MEASURED += ("vit_lora",)
# SphereFace of fedfr_step, and the public classes beside a client's own.
BLOCKS, WIDTHS, DIM, NUM_PUBLIC = (1, 2, 2, 1), (32, 64, 128, 256), 128, 500
# Of vit_lora
VIT = {"width": 192, "depth": 6, "num_heads": 3, "patch_size": 4}
RANK, ALPHA, TARGETS = 8, 16, ("qkv", "proj")


class Data(NamedTuple):
    """float32 images, int32 labels; the same numbers for every system."""

    images: np.ndarray  # [N, n, H, W, C]
    labels: np.ndarray  # [N, n]
    test_images: np.ndarray  # [1000, H, W, C]
    test_labels: np.ndarray  # [1000]


def make_data(work: Workload, seed: int = 0) -> Data:
    """Draw the clients' and the test images."""
    random = np.random.default_rng(seed)
    prototypes = random.standard_normal((work.num_classes, *work.input_shape), "f4")

    def draw(count):
        labels = random.integers(0, work.num_classes, count, np.int32)
        noise = random.standard_normal((count, *work.input_shape), "f4")
        return prototypes[labels] + np.float32(work.noise) * noise, labels

    images, labels = draw(work.population * work.examples)
    shape = (work.population, work.examples)
    return Data(
        images.reshape(*shape, *work.input_shape), labels.reshape(shape), *draw(1000)
    )


def cohort(work: Workload, round: int) -> np.ndarray:
    """Clients of a round, [K], for systems that can be told."""
    random = np.random.default_rng((1, round))
    return random.choice(work.population, work.cohort, replace=False)


def arguments(description: str, **more: dict) -> argparse.Namespace:
    """--workload, --rounds (timed, after one that is not), --threads.

    Args:
      more: flags of one script, name -> keywords of `add_argument`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    for name, settings in more.items():
        parser.add_argument(f"--{name}", **settings)
    return parser.parse_args()


def everyone(work: Workload, num_clients: int) -> Workload:
    """The same work of `num_clients` clients, all of them in every round."""
    return work._replace(population=num_clients, cohort=num_clients)


def processes(run: str) -> list[int]:
    """Ids of a run's processes, orphans included: all that inherited its mark."""
    mark, found = f"{MARK}={run}".encode(), []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            variables = pathlib.Path("/proc", entry, "environ").read_bytes()
        except OSError:
            continue  # gone, or not ours
        if mark in variables.split(b"\0"):
            found.append(int(entry))
    return found


def _read_all(name: str) -> list[str]:
    """A file of /proc of each of this run's processes that still lives."""
    texts = []
    for process in processes(os.environ[MARK]):
        try:
            texts.append(pathlib.Path(f"/proc/{process}/{name}").read_text())
        except OSError:
            continue
    return texts


def cpu_seconds() -> float:
    """User and system time of the run's processes and of the children they buried."""
    fields = [text.rpartition(")")[2].split() for text in _read_all("stat")]
    ticks = sum(int(tick) for field in fields for tick in field[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_mib() -> float:
    """Sum of the peak resident sizes of the processes; shared pages count twice."""
    lines = [line for text in _read_all("status") for line in text.splitlines()]
    peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
    return sum(peaks) / 1024


class Clock:
    """`with clock:` around every round; wall and CPU seconds in order, peak memory."""

    def __init__(self):
        self.wall, self.cpu, self.peak = [], [], 0.0

    def __enter__(self):
        self._cpu, self._start = cpu_seconds(), time.perf_counter()

    def __exit__(self, *_):
        self.wall.append(time.perf_counter() - self._start)
        self.cpu.append(cpu_seconds() - self._cpu)
        self.peak = peak_mib()


def report(version: str, clock: Clock, **facts) -> None:
    """Print the line that run.py reads: the first round is apart, it compiles."""
    row = {
        "version": version,
        "first_seconds": clock.wall[0],
        "seconds": clock.wall[1:],
        "cpu_seconds": clock.cpu[1:],
        "peak_mib": clock.peak,
        **{k: float(v) if np.ndim(v) == 0 else v for k, v in facts.items()},
    }
    print(PREFIX + json.dumps(row), flush=True)
