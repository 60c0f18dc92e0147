"""Our accuracy in a job of the board from the weights that its peers start from.

    python experiments/benchmarks/same_start.py pfl-cifar10 --rounds=100
    python experiments/benchmarks/same_start.py blazefl-cnn --rounds=6 --seed=1 --own

The first call installs the environment of PyTorch's peers.
"""

import argparse
import math
import pathlib
import subprocess
import tempfile

import board_data
import environments
import jax
import numpy as np
import ours
import workloads
from board_jobs import JOBS

from fedfr_jax.distributed import use_every_core
from fedfr_jax.federated import simulation
from fedfr_jax.federated.rounds import run_cohort
from fedfr_jax.types import Cohort

WRITE = """
import sys, numpy, torch_models, workloads
state = torch_models.network(workloads.WORKLOADS[sys.argv[1]]).state_dict()
numpy.savez(sys.argv[2], **{name: x.numpy() for name, x in state.items()})
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=("pfl-cifar10", "blazefl-cnn"))
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of the order of examples")
    parser.add_argument("--own", action="store_true", help="from our own start")
    args = parser.parse_args()
    use_every_core()  # before JAX first asks for devices
    job = JOBS[args.job]
    work = workloads.WORKLOADS[job.workload]
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "data.npz")
        board_data.write(file, work, *job.data)
        with np.load(file) as arrays:
            data = workloads.Data(*(arrays[name] for name in workloads.Data._fields))
        algorithm, variables, logits, feed = ours.maker(work)(work)
        if not args.own:
            params = as_ours(variables["params"], peer_start(job.workload, folder))
            variables = {**variables, "params": params}
    made = algorithm, variables, logits, feed
    sim, server, logits = ours.build(work, data, made, seed=args.seed)
    store = simulation.open_store(sim, server)
    classify = jax.jit(lambda v, x: logits(v, x, False)[0].argmax(1))
    parts = np.array_split(data.test_images, -(-len(data.test_images) // 250))
    for round in range(args.rounds):
        cohort = Cohort(workloads.cohort(work, round), round)
        server, _ = run_cohort(sim, server, store, cohort)
        model = jax.device_put(sim.algorithm.global_model(server), jax.devices()[0])
        found = [classify(model, workloads.to_unit(part)) for part in parts]
        accuracy = (np.concatenate(found) == data.test_labels).mean()
        print(f"round {round + 1}: accuracy {accuracy:.4f}", flush=True)


def peer_start(workload: str, folder: str) -> dict[str, np.ndarray]:
    """State of the module that PyTorch's peers start from."""
    path = pathlib.Path(folder, "start.npz")
    python, here = environments.python_of("torch"), pathlib.Path(__file__).parent
    subprocess.run([python, "-c", WRITE, workload, path], cwd=here, check=True)
    with np.load(path) as arrays:
        return dict(arrays)


def as_ours(params: dict, state: dict[str, np.ndarray]) -> dict:
    """Parameters like `params` of `nn.Sequential`'s convolutions and linear layers."""
    numbers = sorted({name.partition(".")[0] for name in state}, key=int)
    layers, channels = [], 0
    for number in numbers:
        kernel = state[f"{number}.weight"]
        if kernel.ndim == 4:
            kernel = kernel.transpose(2, 3, 1, 0)
            channels = kernel.shape[-1]
        else:
            if channels:  # PyTorch flattens channels first
                side = math.isqrt(kernel.shape[1] // channels)
                kernel = kernel.reshape(-1, channels, side, side)
                kernel, channels = kernel.transpose(0, 2, 3, 1), 0
            kernel = kernel.reshape(len(kernel), -1).T
        layers.append({"kernel": kernel, "bias": state[f"{number}.bias"]})
    names = sorted(params["backbone"])
    backbone = dict(zip(names, layers[:-1], strict=True))
    return {"backbone": backbone, "head": layers[-1]}


if __name__ == "__main__":
    main()
