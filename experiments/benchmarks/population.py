"""Round time and memory against the size of the population, rows of 10 x 64 floats.

    python experiments/benchmarks/population.py [--cohort=256] [--rounds=40]

One process per population, 10,000 and 1,000,000 clients in turns; prints milliseconds a
round (median, after warm-up), peak resident memory, seconds to open the store, and the
ratio of the last to the first. A client owns one example of four bytes, so that what
could grow is the store, the sampling and the schedule.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import results_file


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cohort", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--populations", type=int, nargs="+", default=[10**4, 10**6])
    parser.add_argument("--one", type=int, default=0, help="measure it, print JSON")
    results_file.add_flag(parser)
    return parser.parse_args()


def measure(num_clients: int, cohort: int, rounds: int) -> dict:
    """One population, in this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from fedfr_jax.federated.algorithms.fedavg import fedavg
    from fedfr_jax.federated.algorithms.local import local_sgd, sgd, step_decay
    from fedfr_jax.federated.client import Feed, Population, Table
    from fedfr_jax.federated.simulation import open_store, play, simulation, start
    from fedfr_jax.mesh import make_mesh

    def loss(variables, batch, key):
        del key
        params = variables["params"]
        logits = jnp.tanh(batch.images @ params["body"]) @ params["head"].T
        value = -jax.nn.log_softmax(logits)[:, 0].mean()
        return value, (variables["batch_stats"], {})

    decode = lambda images, is_flipped: images.astype(jnp.float32)
    sim = simulation(
        fedavg(local_sgd(loss, sgd(), step_decay(0.1)), personal="head"),
        Feed(1, decode),
        Table(np.ones((num_clients, 4), np.uint8), np.zeros(num_clients, np.int32)),
        Population(
            np.arange(num_clients + 1, dtype=np.int32), np.ones(num_clients, np.int32)
        ),
        mesh=make_mesh(1),
        cohort_size=cohort,
    )
    params = {"body": jnp.ones((4, 64)), "head": jnp.zeros((10, 64))}
    server = start(sim, {"params": params, "batch_stats": {}})
    spent = []
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        store = open_store(sim, server, folder)
        opened = time.perf_counter() - begin
        for round in range(rounds + 3):
            begin = time.perf_counter()
            server, _ = play(sim, server, store, round)
            spent.append(1e3 * (time.perf_counter() - begin))
        store.flush(rounds)
    return {
        "clients": num_clients,
        "round_ms": statistics.median(spent[3:]),
        "fastest_ms": min(spent[3:]),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "open_seconds": opened,
    }


def main():
    """Print a row per population, and the ratios."""
    args = parse_arguments()
    if args.one:
        return print(json.dumps(measure(args.one, args.cohort, args.rounds)))
    rows = []
    for number in args.populations:
        command = [sys.executable, __file__, f"--one={number}"]
        command += [f"--cohort={args.cohort}", f"--rounds={args.rounds}"]
        out = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(out.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    names = ("round_ms", "fastest_ms", "peak_mib")
    ratios = {name: rows[-1][name] / rows[0][name] for name in names}
    for name, ratio in ratios.items():
        print(f"{name}: x{ratio:.3f}")
    named = {f"{row['clients']} clients": row for row in rows}
    results_file.write(args.out, {**named, "last over first": ratios})


if __name__ == "__main__":
    main()
