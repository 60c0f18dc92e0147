"""What the canonical reduction costs: rounds of 512 clients of a small MLP.

    python experiments/benchmarks/reduction.py [--devices=2] [--rounds=20]

784-64-10, 20 examples a client in batches of 10, one epoch. Both reductions play the
same rounds in turns; prints milliseconds a round and the ratio canonical / sum.
"""

import argparse
import os
import statistics
import time

import results_file


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=512)
    parser.add_argument("--lanes", type=int, default=1)
    results_file.add_flag(parser)
    return parser.parse_args()


def loss(variables, batch, key):
    """Softmax cross-entropy of the MLP."""
    import jax
    import jax.numpy as jnp

    del key
    params = variables["params"]
    hidden = jax.nn.relu(batch.images @ params["first"])
    scores = jax.nn.log_softmax(hidden @ params["second"])
    picked = jnp.take_along_axis(scores, batch.labels[:, None], 1)
    return -picked.mean(), (variables["batch_stats"], {})


def mlp(num_clients, num_devices, **options):
    """(simulation, server, store) of the workload."""
    import jax.numpy as jnp
    import numpy as np

    from fedfr_jax.data.batching import Batching
    from fedfr_jax.federated.algorithms.fedavg import fedavg
    from fedfr_jax.federated.client import Population
    from fedfr_jax.federated.local import sgd
    from fedfr_jax.federated.simulation import (
        build_simulation,
        open_store,
        start_simulation,
    )
    from fedfr_jax.mesh import make_mesh
    from fedfr_jax.types import Dataset, LocalTraining

    random = np.random.default_rng(0)
    images = random.normal(size=(20 * num_clients, 784)).astype(np.float32)
    labels = random.integers(10, size=len(images)).astype(np.int32)
    params = {
        "first": jnp.asarray(random.normal(0, 0.05, (784, 64)), jnp.float32),
        "second": jnp.asarray(random.normal(0, 0.1, (64, 10)), jnp.float32),
    }
    sim = build_simulation(
        fedavg(LocalTraining(loss, sgd(), 0.1)),
        Batching(10),
        Dataset.from_arrays(images, labels),
        Population(np.arange(0, len(images) + 1, 20), np.full(num_clients, 10)),
        mesh=make_mesh(num_devices),
        **options,
    )
    server = start_simulation(sim, {"params": params, "batch_stats": {}})
    return sim, server, open_store(sim, server)


def main():
    """Print both reductions and their ratio."""
    args = parse_arguments()
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + f" --xla_force_host_platform_device_count={args.devices}"
    )
    import jax

    from fedfr_jax.federated.simulation import simulate_round

    names = ("sum", "canonical")
    runs = {
        name: mlp(
            args.clients,
            args.devices,
            clients_per_device=args.lanes,
            reproducible_sum=name == "canonical",
        )
        for name in names
    }
    spent = {name: [] for name in names}
    for round in range(args.rounds + 2):
        for name, (sim, server, store) in runs.items():
            begin = time.perf_counter()
            server, _ = simulate_round(sim, server, store, round)
            jax.block_until_ready(server)
            spent[name].append(1e3 * (time.perf_counter() - begin))
            runs[name] = sim, server, store
    rows = {}
    for name in names:
        times = spent[name] = spent[name][2:]
        rows[name] = {"median_ms": statistics.median(times), "fastest_ms": min(times)}
        print(
            f"{name:10} median {statistics.median(times):.1f} ms, "
            f"fastest {min(times):.1f} ms"
        )
    plain, canonical = (spent[name] for name in names)
    pairs = [c / p for p, c in zip(plain, canonical, strict=True)]
    ratios = {
        "fastest": min(canonical) / min(plain),
        "median of pairs": statistics.median(pairs),
    }
    parts = [f"{name} {ratio:.3f}" for name, ratio in ratios.items()]
    print(f"canonical / sum: {', '.join(parts)}")
    results_file.write(args.out, {**rows, "canonical over sum": ratios})


if __name__ == "__main__":
    main()
