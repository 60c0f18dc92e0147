"""One process of a small federated run: python -m tests.federated.process_worker.

[--devices=D] [--stop=R] [--rows_read=FILE] --algorithms=a,b --workdir=DIR and, among
several, the flags that `launch` gives.
"""

import json
import os
import pathlib
import signal
import sys

import numpy as np

from fedfr_jax import processes

ROUNDS = 5


def main(argv):
    given = dict(word.removeprefix("--").split("=", 1) for word in argv)
    flag = f"{processes.DEVICES_FLAG}={given.get('devices', 2)}"
    os.environ.update(XLA_FLAGS=flag, JAX_PLATFORMS="cpu")
    processes.use_every_core()
    if "coordinator" in given:
        number, count = int(given["process_id"]), int(given["num_processes"])
        processes.join(given["coordinator"], count, number)
    is_victim = given.get("process_id") == "1" and kill_now(given)
    kill = int(given["kill"]) if is_victim else 0
    for name in given["algorithms"].split(","):
        folder = pathlib.Path(given["workdir"]) / name
        run(name, folder, int(given.get("stop", ROUNDS)), kill=kill)


def kill_now(given):
    """Whether this start is the one that ends badly: the first."""
    marker = pathlib.Path(given["workdir"]) / "killed"
    if "kill" not in given or marker.exists():
        return False
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
    return True


def run(name, folder, stop, *, kill=0, **options):
    """Start or go on under `folder` up to round `stop`; result.npz has the end."""
    import jax

    from fedfr_jax import mesh as meshes
    from fedfr_jax.federated.simulation import simulation, start
    from fedfr_jax.runs import loop
    from fedfr_jax.runs.sinks import open_sinks
    from tests.federated import toys

    algorithm, variables = TOYS[name](toys)
    table, population = toys.problem()
    sim = simulation(
        algorithm,
        toys.feed(),
        table,
        population,
        mesh=meshes.make_mesh(),
        cohort_size=4,
        local_epochs=2,
        seed=3,
        **options,
    )
    server, store, checkpointer, first = loop.resume(sim, start(sim, variables), folder)

    def killer(round, scalars):
        if kill and round == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    with open_sinks(folder, name, ROUNDS, first) as sinks:
        server = loop.train(
            sim,
            server,
            store,
            checkpointer,
            first_round=first,
            num_rounds=stop,
            evaluate=lambda server, store: {},
            sinks=[*sinks, killer],
        )
    checkpointer.close()
    server = meshes.fetch(server)
    rows, is_new = store.gather(np.arange(len(toys.SIZES)))
    if meshes.is_first():
        leaves = jax.tree.leaves((server, rows))
        np.savez(folder / "result.npz", *leaves, is_new)


def result(folder):
    """(arrays, rows of metrics.jsonl without seconds) of a finished `run`."""
    with np.load(folder / "result.npz") as arrays:
        ends = [arrays[name] for name in arrays.files]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [{k: v for k, v in json.loads(x).items() if k != "seconds"} for x in lines]
    return ends, rows


TOYS = {
    "fedavg": lambda toys: toys.fedavg_toy(personal="head"),
    "fedfr": lambda toys: toys.fedfr_toy(),
}

if __name__ == "__main__":
    main(sys.argv[1:])
