"""What every system must agree on: the work, the data, the clock, the report.

numpy only, so that it can be imported in every system's environment. Images are those
of --data, see `board_data.py`; without it a prototype per class plus noise, in the
order in which they are trained on; learning is visible after a round, and equal work
must reach equal accuracy.
"""

import argparse
import hashlib
import json
import os
import pathlib
import resource
import time
from typing import NamedTuple

import numpy as np

MARK = "FEDFR_BENCHMARK_RUN"  # in the environment of every process of a run
PREFIX = "RESULT "


class Private(NamedTuple):
    """Clipped updates, and noise on their sum as of a larger cohort."""

    clip_norm: float
    noise_multiplier: float
    noise_cohort: int  # whose noise on the mean it is


class Workload(NamedTuple):
    """Plain SGD on softmax cross entropy, without augmentation."""

    # mlp: 64 hidden; cnn: 3x3 x 32, 3x3 x 64, pool, 128 hidden; lenet: 5x5 x 6, pool,
    # 5x5 x 16, pool, 120 and 84 hidden; wide_lenet: 5x5 x 32, pool, 5x5 x 64, pool, 512
    # hidden; resnet18, torchvision's; sphereface; vit, a frozen one with LoRA
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
    dropout: tuple[float, float] = (0.0, 0.0)  # of cnn, after pooling and the hidden
    private: Private | None = None
    evaluate_every: int = 0  # rounds; 0: after the last

    @property
    def steps(self) -> int:
        """Local steps of a whole round."""
        return self.cohort * self.epochs * -(-self.examples // self.batch_size)


PFL = Workload(
    *("cnn", (32, 32, 3), 10, 1000, 50, 50, 10), dropout=(0.25, 0.5), evaluate_every=10
)
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
    # Of the board, see `board_jobs.py`: pfl-research's, BlazeFL's, PFLlib's.
    "pfl_cifar10": PFL,
    # The noise multiplier of epsilon 2 at delta 1e-6 for 1,500 rounds, in each of which
    # a client of a million takes part with probability 1,000 / 1e6.
    "pfl_cifar10_dp": PFL._replace(private=Private(0.4, 0.616, 1000)),
    "blazefl_all": Workload("lenet", (32, 32, 3), 10, 100, 100, 500, 50, epochs=5),
    "blazefl_resnet18": Workload(
        "resnet18", (32, 32, 3), 10, 100, 100, 500, 50, epochs=5
    ),
    "pfllib_500": Workload(
        "wide_lenet", (32, 32, 3), 100, 500, 500, 90, 10, rate=0.005
    ),
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
    parser.add_argument("--data", help="file of `board_data.py`; else images are made")
    parser.add_argument("--cohort", type=int, help="clients of a round, fewer than all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    for name, settings in more.items():
        parser.add_argument(f"--{name}", **settings)
    return parser.parse_args()


def inputs(
    args: argparse.Namespace, *, as_pixels: bool = False
) -> tuple[Workload, Data]:
    """The work and the images that the flags of `arguments` ask for.

    Args:
      as_pixels: images of a file stay uint8.
    """
    work = WORKLOADS[args.workload]
    work = work._replace(cohort=args.cohort or work.cohort)
    if not args.data:
        return work, make_data(work)
    with np.load(args.data) as file:
        data = Data(*(file[name] for name in Data._fields))
    if as_pixels:
        return work, data
    return work, data._replace(
        images=to_unit(data.images), test_images=to_unit(data.test_images)
    )


def to_unit(pixels: np.ndarray) -> np.ndarray:
    """uint8 as float32 in [-1, 1]."""
    values = pixels.astype(np.float32)
    values /= 127.5  # in place, as memory is measured
    values -= 1
    return values


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


def peak_mib_of_children() -> float:
    """Peak resident size of the largest process that was waited for."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


class Clock:
    """`with clock:` around every round; wall and CPU seconds in order, peak memory.

    Each round is printed.
    `clock.evaluate(work, accuracy_fn)` between rounds keeps [round, accuracy] and its
    own seconds, where the work asks for one.
    """

    def __init__(self):
        self.wall, self.cpu, self.peak = [], [], 0.0
        self.curve, self.evaluating = [], 0.0

    def __enter__(self):
        self._cpu, self._start = cpu_seconds(), time.perf_counter()

    def __exit__(self, *_):
        self.wall.append(time.perf_counter() - self._start)
        self.cpu.append(cpu_seconds() - self._cpu)
        self.peak = peak_mib()
        print(f"round {len(self.wall)}: {self.wall[-1]:.3f} s", flush=True)

    def evaluate(self, work: Workload, accuracy_fn) -> None:
        rounds, every = len(self.wall), work.evaluate_every
        if every and rounds % every == 0:
            begin = time.perf_counter()
            self.curve.append([rounds, float(accuracy_fn())])
            self.evaluating += time.perf_counter() - begin


def digest(arrays) -> str:
    """Digest of numpy arrays in order: equal only for equal bits."""
    result = hashlib.sha256()
    for array in arrays:
        result.update(np.ascontiguousarray(array).tobytes())
    return result.hexdigest()[:16]


def compared(digests: dict[str, str]) -> dict:
    """Facts of a report on the bits of a server that several ways have trained."""
    listed = ", ".join(f"{name} {digest[:6]}" for name, digest in digests.items())
    return {
        "digests": digests,
        "same bits": "yes" if len({*digests.values()}) == 1 else "no",
        "note": f"bits of the server after the rounds: {listed}",
    }


def is_plain(value) -> bool:
    """Whether JSON takes it as it is."""
    return isinstance(value, str | list | dict)


def report(version: str, clock: Clock, **facts) -> None:
    """Print the line that run.py reads: the first round is apart, it compiles."""
    row = {
        "version": version,
        "first_seconds": clock.wall[0],
        "seconds": clock.wall[1:],
        "cpu_seconds": clock.cpu[1:],
        "peak_mib": clock.peak,
        **{k: v if is_plain(v) else float(v) for k, v in facts.items()},
    }
    if clock.curve:
        row |= {"curve": clock.curve, "evaluation_seconds": clock.evaluating}
    print(PREFIX + json.dumps(row), flush=True)
