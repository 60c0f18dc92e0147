"""Round time and memory against the size of the population, rows of 10 x 64 floats.

    python experiments/benchmarks/population.py [--cohort=256] [--rounds=100] \
        [--processes=5] [--virtual --populations 10000 100000000]

10,000 and 1,000,000 clients. A client owns one example of four bytes, so that what
could grow is the store, the sampling and the schedule. With --virtual those examples
are made when they are read (`FederatedDataset.from_reader`), so that no array has an
entry per client; without, image, label and offset of each are in memory.

Peak resident memory and the seconds to open a new store, and one with rows whose files
have left the page cache, are medians of --processes per population, in turns.

Rounds are timed in one process, in turns: milliseconds until the round is back (median
and fastest), and until its rows are written, which in a run is beside the next round.
The rounds are played once before they are timed, so that in either population every
client of a cohort has a row to read. Prints also the ratios of the last population to
the first.
"""

import argparse
import gc
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import results_file

OPENINGS, ROUNDS_ALONE = 5, 40


def drop_from_cache(folder):
    """Forget the pages of all files in a folder.

    Raises:
      RuntimeError: when this process maps one: its pages would stay.
    """
    folder = pathlib.Path(folder).resolve()
    if f"{folder}/" in pathlib.Path("/proc/self/maps").read_text():
        raise RuntimeError(f"no file of {folder} must be mapped, got one that is.")
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # what is not on the disk cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cohort", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=100, help="in turns")
    parser.add_argument("--repeats", type=int, default=4, help="of the rounds, timed")
    parser.add_argument("--processes", type=int, default=5, help="per population")
    parser.add_argument("--populations", type=int, nargs="+", default=[10**4, 10**6])
    parser.add_argument("--one", type=int, default=0, help="alone, print JSON")
    parser.add_argument("--virtual", action="store_true", help="no example in memory")
    results_file.add_flag(parser)
    return parser.parse_args()


def build(num_clients: int, cohort: int, is_virtual: bool):
    """(simulation, server) of one population."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fedfr_jax.api import FederatedDataset
    from fedfr_jax.data.batching import Batching
    from fedfr_jax.federated.algorithms.fedavg import fedavg
    from fedfr_jax.federated.algorithms.personal import with_personal_layers
    from fedfr_jax.federated.client import Population
    from fedfr_jax.federated.local import sgd
    from fedfr_jax.federated.settings import Settings
    from fedfr_jax.federated.simulation import build_simulation, start_simulation
    from fedfr_jax.mesh import make_mesh
    from fedfr_jax.types import Augment, Dataset, LocalTraining

    def loss(variables, batch, key):
        del key
        params = variables["params"]
        logits = jnp.tanh(batch.images @ params["body"]) @ params["head"].T
        value = -jax.nn.log_softmax(logits)[:, 0].mean()
        return value, (variables["batch_stats"], {})

    def apply(key, inputs, targets):
        del key
        return {"image": inputs["image"].astype(jnp.float32)}, targets

    images = lambda rows: np.ones((len(rows), 4), np.uint8)
    labels = np.broadcast_to(np.int32(0), num_clients)
    if is_virtual:
        data = FederatedDataset.from_reader(
            images, labels, num_clients=num_clients, num_classes=1
        )
        table, population = data.dataset, data.population
    else:  # what a split gives
        table = Dataset.from_arrays(images(labels), labels.copy())
        offsets = np.arange(num_clients + 1)
        population = Population(offsets, np.broadcast_to(np.int32(1), num_clients))
    sim = build_simulation(
        with_personal_layers(fedavg(LocalTraining(loss, sgd(), 0.1)), "head"),
        Batching(1, Augment(apply, num_views=1)),
        table,
        population,
        Settings(cohort_size=cohort),
        mesh=make_mesh(1),
    )
    params = {"body": jnp.ones((4, 64)), "head": jnp.zeros((10, 64))}
    return sim, start_simulation(sim, {"params": params, "batch_stats": {}})


def alone(num_clients: int, cohort: int, is_virtual: bool) -> dict:
    """Memory and openings of one population, in this process."""
    from fedfr_jax.federated.rounds import advance
    from fedfr_jax.federated.simulation import open_store

    sim, server = build(num_clients, cohort, is_virtual)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(sim, server, folder)
        for round in range(ROUNDS_ALONE):
            server, _ = advance(sim.runs, server, [store], round)
        store.flush(ROUNDS_ALONE)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        del store
        opened = [open_new(sim, server) for _ in range(OPENINGS)]
        reopened = [reopen(sim, server, folder) for _ in range(OPENINGS)]
    return {
        "clients": num_clients,
        "peak_mib": peak,
        "open_seconds": statistics.median(opened),
        "reopen_seconds": statistics.median(reopened),
    }


def in_processes(args) -> list[dict]:
    """Medians of what `alone` finds, a row per population."""
    found = {number: [] for number in args.populations}
    for number in args.populations * args.processes:
        command = [sys.executable, __file__, f"--one={number}"]
        command += [f"--cohort={args.cohort}", *["--virtual"][: args.virtual]]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[number].append(json.loads(out.stdout.splitlines()[-1]))
    return [
        {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        | {"clients": number}
        for number, rows in found.items()
    ]


def open_new(sim, server) -> float:
    """Seconds to make a store."""
    from fedfr_jax.federated.simulation import open_store

    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        store = open_store(sim, server, folder)
        seconds = time.perf_counter() - begin
        del store  # not within the time
    return seconds


def reopen(sim, server, folder) -> float:
    """Seconds to open a store that has rows, from the disk."""
    from fedfr_jax.federated.simulation import open_store

    gc.collect()  # of an earlier store, which would keep its stamps mapped
    drop_from_cache(folder)
    begin = time.perf_counter()
    store = open_store(sim, server, folder, resume_round=ROUNDS_ALONE)
    seconds = time.perf_counter() - begin
    del store  # not within the time
    return seconds


def in_turns(args) -> dict[int, dict]:
    """{population: milliseconds of a round}, one round of each after the other."""
    from fedfr_jax.federated.simulation import open_store

    runs, spent = {}, {number: [] for number in args.populations}
    for number in args.populations:
        sim, server = build(number, args.cohort, args.virtual)
        runs[number] = sim, server, open_store(sim, server)
    for repeat in range(1 + args.repeats):
        for round in range(args.rounds):
            for number in args.populations[:: 1 if round % 2 else -1]:
                runs[number], took = play_round(runs[number], round)
                spent[number] += [took] if repeat else []
        for _, _, store in runs.values():
            store.flush(args.rounds)  # else it would be written back while timing
    return {number: summarize(times) for number, times in spent.items()}


def play_round(run, round: int):
    """(run after the round, (ms until it was back, ms until its rows were written))."""
    from fedfr_jax.federated.rounds import advance

    sim, server, store = run
    begin = time.perf_counter()
    server, _ = advance(sim.runs, server, [store], round)
    back = time.perf_counter()
    store.settle()
    written = time.perf_counter()
    return (sim, server, store), (1e3 * (back - begin), 1e3 * (written - begin))


def summarize(times: list[tuple[float, float]]) -> dict[str, float]:
    """Median and fastest of a population's rounds."""
    back, written = zip(*times, strict=True)
    return {
        "round_ms": statistics.median(back),
        "fastest_ms": min(back),
        "written_ms": statistics.median(written),
        "rounds": len(times),
    }


def main():
    """Print a row per population, and the ratios."""
    args = parse_arguments()
    if args.one:
        return print(json.dumps(alone(args.one, args.cohort, args.virtual)))
    rows = in_processes(args)  # first: a process inherits the peak of its parent
    times = in_turns(args)
    rows = [{**row, **times[row["clients"]]} for row in rows]
    print(*rows, sep="\n")
    names = ("round_ms", "fastest_ms", "written_ms", "peak_mib")
    ratios = {name: rows[-1][name] / rows[0][name] for name in names}
    for name, ratio in ratios.items():
        print(f"{name}: x{ratio:.3f}")
    kind = "virtual: " if args.virtual else "arrays: "
    named = {f"{kind}{row['clients']} clients": row for row in rows}
    results_file.write(args.out, {**named, f"{kind}last over first": ratios})


if __name__ == "__main__":
    main()
