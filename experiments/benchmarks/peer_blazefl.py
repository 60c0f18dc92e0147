"""BlazeFL 3.0: its plain loop with several threads, or its pool of a process per core.

With --threads=1 it is the pool. Its pool of threads needs a Python without a global
lock. It asks for Python 3.14; for an older one two of its functions lose their type
parameter, and annotations are not evaluated. It shuffles each client's examples.
--bits trains in several ways instead, and compares the bits of the server.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import sys
import tempfile
from enum import StrEnum

import numpy as np
import torch
import torch.multiprocessing as processes
import workloads
from torch.utils.data import DataLoader, TensorDataset
from torch_models import accuracy, digest_of, network, tensors

COPY = pathlib.Path(tempfile.gettempdir()) / "blazefl_for_older_python"


def importable(version: tuple[int, int] = sys.version_info[:2]) -> None:
    """Put a copy of the package that an older Python can read on the path."""
    if version >= (3, 14):
        return
    [folder] = importlib.util.find_spec("blazefl").submodule_search_locations
    for path in pathlib.Path(folder).rglob("*.py"):
        copy = COPY / "blazefl" / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists():  # the pool's processes import it too
            copy.write_text(without_type_parameters(path.read_text()))
    sys.path.insert(0, str(COPY))


def without_type_parameters(text: str) -> str:
    """A module's text without the syntax of Python 3.12 and later."""
    if "[T](" in text:
        text = re.sub(r"(:| ->) T\b", "", text.replace("[T](", "("))
    docstring = re.match(r'\s*""".*?"""\n', text, re.DOTALL)
    end = docstring.end() if docstring else 0
    return f"{text[:end]}from __future__ import annotations\n{text[end:]}"


class Network(StrEnum):
    """The only model."""

    WORKLOAD = "workload"


class Networks:
    """Builds the workload's model."""

    def __init__(self, work):
        self.work = work

    def select_model(self, model_name):
        del model_name
        return network(self.work)


class Clients:
    """Clients' examples, of memory-mapped files, as the pool pickles this object."""

    def __init__(self, folder, examples):
        self.folder, self.examples = folder, examples

    def get_dataset(self, type_, cid):
        del type_
        rows = [
            np.load(f"{self.folder}/{name}.npy", mmap_mode="r")[cid or 0]
            for name in ("images", "labels")
        ]
        return TensorDataset(*tensors(*rows))

    def set_dataset(self, type_, cid, dataset):
        """The pool gives each client its examples back."""

    def get_dataloader(self, type_, cid, batch_size, generator=None):
        examples = self.get_dataset(type_, cid)
        return DataLoader(
            examples,
            batch_size=batch_size or self.examples,
            shuffle=True,
            generator=generator,
        )


def federation(work, num_rounds: int, folder: str, threads: int):
    """(server, trainer) of BlazeFL's own FedAvg."""
    from blazefl.contrib import (
        FedAvgBaseClientTrainer,
        FedAvgBaseServerHandler,
        FedAvgProcessPoolClientTrainer,
    )

    common = {
        "model_selector": Networks(work),
        "model_name": Network.WORKLOAD,
        "dataset": Clients(folder, work.examples),
        "num_clients": work.population,
        "device": "cpu",
        "batch_size": work.batch_size,
        "seed": 42,
    }
    ratio = min((work.cohort + 0.5) / work.population, 1.0)  # it rounds down
    server = FedAvgBaseServerHandler(
        global_round=num_rounds, sample_ratio=ratio, **common
    )
    training = {"epochs": work.epochs, "lr": work.rate, **common}
    if threads > 1:
        return server, FedAvgBaseClientTrainer(**training)
    pool = FedAvgProcessPoolClientTrainer(
        state_dir=pathlib.Path(folder, "state"),
        num_parallels=len(os.sched_getaffinity(0)),
        **training,
    )
    return server, pool


def play(work, num_rounds: int, folder: str, threads: int, clock) -> torch.nn.Module:
    """The server's model after the rounds, on the examples in the folder."""
    from blazefl.reproducibility import setup_reproducibility

    setup_reproducibility(42)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of the pool's processes
    server, trainer = federation(work, num_rounds, folder, threads)
    for round in range(num_rounds):
        clients = workloads.cohort(work, round).tolist()
        with clock:
            trainer.local_process(server.downlink_package(), clients)
            for package in trainer.uplink_package():
                server.load(package)
    return server.model


def bits(work, num_rounds: int, folder: str, threads: int, clock) -> dict:
    """Facts on the bits of its loop, of the same again, and of its pool."""
    ways = {"loop": threads, "loop again": threads, "a process a core": 1}
    return workloads.compared(
        {
            name: digest_of(play(work, num_rounds, folder, count, clock))
            for name, count in ways.items()
        }
    )


def main():
    args = workloads.arguments(__doc__, bits={"action": "store_true"})
    (work, data), clock = workloads.inputs(args), workloads.Clock()
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/images.npy", data.images)
        np.save(f"{folder}/labels.npy", data.labels)
        settings = work, 1 + args.rounds, folder, args.threads, clock
        if args.bits:
            facts = bits(*settings)
        else:
            model = play(*settings)
            test = tensors(data.test_images, data.test_labels)
            facts = {"accuracy": accuracy(model, *test), "digest": digest_of(model)}
    version = f"{importlib.metadata.version('blazefl')}, torch {torch.__version__}"
    workloads.report(version, clock, **facts)


importable()
if __name__ == "__main__":
    processes.set_start_method("spawn")
    main()
