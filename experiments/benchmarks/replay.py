"""Members of one replay against as many replays one after the other.

    python experiments/benchmarks/replay.py --model=mlp --members=16

The same rounds without client 0, 1, ...: once as members of one program, once as single
runs, each without a client, that share a compiled program. Both have compiled before.
A last group of members that is not full is filled up.
"""

import argparse
import json
import time

import jax
import numpy as np
import optax

import fedfr_jax as ff
from fedfr_jax.federated.replay import Replayer
from fedfr_jax.federated.simulation import open_store

SHAPE = (28, 28, 1)
MODELS = {
    "logistic": {},
    "mlp": {"hidden_dim": 32},
    "cnn": {"widths": (8, 16)},
}


def build(model: str, num_clients: int, examples: int):
    """A run before its first round, on images of noise."""
    rng = np.random.default_rng(0)
    count = num_clients * examples
    x = rng.normal(size=(count, *SHAPE)).astype(np.float32)
    y = rng.integers(0, 10, count)
    data = ff.FederatedDataset.from_client_ids(x, y, np.arange(count) % num_clients)
    network = ff.MODELS[model](SHAPE, num_classes=10, **MODELS[model])

    def loss(variables, batch, key):
        logits, batch_stats = network.apply(variables, batch.images, True, key=key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        return ff.masked_mean(losses, batch.is_valid), (batch_stats, {})

    algorithm = ff.fedavg(ff.LocalTraining(loss, optax.sgd, 0.05))
    variables = network.init(jax.random.key(0))
    return ff.init(algorithm, data, variables, batch_size=16, cohort_size=num_clients)


def one_by_one(run, num_rounds: int, count: int):
    """The run without each of the clients, each alone."""
    for client in range(count):
        sim = run.sim._replace(excluded=np.array([client]))
        state = run._replace(sim=sim, store=open_store(sim, run.server))
        for _ in range(num_rounds):
            state, _ = ff.run_round(state)
        jax.block_until_ready(state.server)


def main():
    """Print seconds of both, and their ratio, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--group_size", type=int, default=16)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    run = build(options.model, options.clients, options.examples)
    excluded = [np.array([client]) for client in range(options.members)]
    replayer = Replayer(run.sim, run.server, options.rounds, options.group_size)
    seconds = {"seconds_of_members": [], "seconds_one_by_one": []}
    for _ in range(options.repeats + 1):
        begin = time.perf_counter()
        jax.block_until_ready([x.server for x in replayer.train(excluded)])
        middle = time.perf_counter()
        one_by_one(run, options.rounds, options.members)
        seconds["seconds_of_members"].append(middle - begin)
        seconds["seconds_one_by_one"].append(time.perf_counter() - middle)
    best = {name: min(values[1:]) for name, values in seconds.items()}
    members, single = best.values()
    print(json.dumps({**vars(options), **best, "ratio": members / single}))


if __name__ == "__main__":
    main()
