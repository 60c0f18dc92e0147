"""What a round costs beside arithmetic: one scalar, nothing to learn from it.

    python experiments/benchmarks/overhead.py [--clients 1000 10000] [--lanes=1]
        [--devices=1]

Prints milliseconds per round, median and fastest, of whole rounds and, in turns with
them, of rounds that are taken apart (which costs something itself): the host's part
(sampling, scheduling, copies, rows, metrics) and the compiled call, which for an empty
model is the engine's own: loops and sums (keys and batches, which nothing asks for, are
left out by the compiler). Everybody has taken part before. A round of several thousand
clients tells what each thousand takes, and what a round takes whatever its clients.
Then what it takes to draw a cohort of 256 from a million and from a billion clients.
"""

import argparse
import os
import statistics
import time
import timeit
import tracemalloc

import results_file


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[1000, 10000], help="of a round"
    )
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--reproducible_sum", action="store_true")
    results_file.add_flag(parser)
    return parser.parse_args()


def empty(cohort_size, num_devices, **options):
    """A simulation of a model of one scalar; every round draws half of the clients,
    who own one example each."""
    import jax.numpy as jnp
    import numpy as np

    from fedfr_jax.data.batching import Batching
    from fedfr_jax.federated.algorithms.fedavg import fedavg
    from fedfr_jax.federated.client import Population
    from fedfr_jax.federated.simulation import (
        build_simulation,
        open_store,
        start_simulation,
    )
    from fedfr_jax.mesh import make_mesh
    from fedfr_jax.types import Dataset

    def train(key, variables, client):
        del key
        return variables, {"steps": client.num_steps.astype(jnp.float32)}

    num_clients = 2 * cohort_size
    sim = build_simulation(
        fedavg(train),
        Batching(1),
        Dataset.from_arrays(
            np.zeros((num_clients, 1), np.float32), np.zeros(num_clients, np.int32)
        ),
        Population(np.arange(num_clients + 1), np.ones(num_clients, np.int32)),
        mesh=make_mesh(num_devices),
        cohort_size=cohort_size,
        **options,
    )
    server = start_simulation(sim, {"params": {"x": jnp.zeros(())}, "batch_stats": {}})
    return sim, server, open_store(sim, server)


def main():
    """Print host, device and total milliseconds per round, then what sampling takes."""
    args = parse_arguments()
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + f" --xla_force_host_platform_device_count={args.devices}"
    )
    rows = {}
    for clients in args.clients:
        rows |= rounds(clients, args)
    for population in (10**6, 10**9):
        micros, kib = sampling(population, 256)
        print(f"256 of {population:,}: {micros:.0f} us, peak {kib:.0f} KiB")
        rows[f"256 of {population}"] = {"fastest_us": micros, "peak_kib": kib}
    results_file.write(args.out, rows)


def rounds(clients: int, args) -> dict[str, dict[str, float]]:
    """Milliseconds of rounds of `clients`, by part."""
    import jax

    from fedfr_jax.federated.engine import Program
    from fedfr_jax.federated.simulation import simulate_round

    sim, server, store = empty(
        clients,
        args.devices,
        clients_per_device=args.lanes,
        reproducible_sum=args.reproducible_sum,
    )
    apart, inside, run = [], [], sim.programs.run_whole

    def timed(*arguments):
        jax.block_until_ready(arguments)
        begin = time.perf_counter()
        result = jax.block_until_ready(run(*arguments))
        inside.append(1e3 * (time.perf_counter() - begin))
        return result

    timed.lower = run.lower  # guarded like a round's own
    programs = sim.programs._replace(run_whole=Program(timed))
    spent, sims = [], (sim, sim._replace(programs=programs))
    for round in range(-4, 2 * args.rounds):
        begin = time.perf_counter()
        server, _ = simulate_round(
            sims[round % 2], server, store, round // 2 % args.rounds
        )
        (spent, apart)[round % 2].append(1e3 * (time.perf_counter() - begin))
    spent, apart, inside = spent[2:], apart[2:], inside[2:]
    host = [total - device for total, device in zip(apart, inside, strict=True)]
    rows = {}
    for name, values in (("total", spent), ("host", host), ("compiled", inside)):
        median, fastest = statistics.median(values), min(values)
        print(
            f"{clients:6} clients, {name:9} median {median:.2f} ms, "
            f"fastest {fastest:.2f} ms"
        )
        row = {"median_ms": median, "fastest_ms": fastest}
        rows[f"{name} of a round of {clients}"] = row
    return rows


def sampling(population: int, cohort: int) -> tuple[float, float]:
    """Fastest of many draws in microseconds, and the peak of one in KiB."""
    from fedfr_jax.federated.sampling import sample_cohort

    draw = lambda: sample_cohort(0, 1, population, cohort)
    tracemalloc.start()
    draw()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return 1e6 * min(timeit.repeat(draw, number=1, repeat=500)), peak / 2**10


if __name__ == "__main__":
    main()
