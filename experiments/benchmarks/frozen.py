"""A round with frozen layers: masked as before, shared, and on kept features.

    python experiments/benchmarks/frozen.py

EMNIST-like CNN on 32 pixels, 16 clients, 5 epochs, all but the classifier frozen. In
turns, best of the rounds after the first.
"""

import argparse
import json
import time

import jax
import numpy as np
import optax

import fedfr_jax as ff
from fedfr_jax import trees
from fedfr_jax.distributed import use_every_core
from fedfr_jax.federated.feature_cache import keep_features
from fedfr_jax.tasks.classification import cross_entropy
from fedfr_jax.types import FeatureStorage

CLIENTS, EACH, BATCH, EPOCHS, SIDE = 16, 100, 20, 5, (32, 32, 1)
FROZEN = "params/(?!classifier)"


def data():
    """Images of noise, ten classes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(CLIENTS * EACH, *SIDE)).astype(np.float32)
    return ff.FederatedDataset.from_client_ids(
        x, np.arange(len(x)) % 62, np.arange(len(x)) // EACH
    )


def start(kind: str, mesh):
    """A run whose clients train the classifier, or with `all` everything."""
    network, clients = ff.MODELS["cnn"](SIDE, num_classes=62), data()
    base, batching = network.init(jax.random.key(0)), ff.Batching(BATCH)
    model, variables, optimizer = network, base, optax.sgd
    if kind == "masked":
        optimizer = lambda rate: trees.freeze(optax.sgd(rate), FROZEN)
    if kind in ("shared", "features"):
        model = ff.with_frozen(network, FROZEN, base)
        variables = ff.moving_variables(model, base)
    if kind == "features":
        storage = FeatureStorage("device")
        kept = keep_features(model, clients.dataset, batching, mesh, storage)
        clients, batching = clients._replace(dataset=kept.table), kept.batching
    local = ff.LocalTraining(cross_entropy(model), optimizer, 0.1)
    options = {"local_epochs": EPOCHS, "mesh": mesh, "batching": batching}
    return ff.init(ff.fedavg(local), clients, variables, batch_size=BATCH, **options)


def main():
    """Print seconds of a round and their ratios to the masked one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    use_every_core()
    mesh = ff.make_mesh()
    runs = {k: start(k, mesh) for k in ("all", "masked", "shared", "features")}
    seconds = {kind: [] for kind in runs}
    for _ in range(1 + args.rounds):
        for kind in runs:
            begin = time.perf_counter()
            runs[kind], metrics = ff.run_round(runs[kind])
            jax.block_until_ready(runs[kind].server)
            seconds[kind].append(time.perf_counter() - begin)
    best = {kind: min(times[1:]) for kind, times in seconds.items()}
    ratios = {kind: best["masked"] / x for kind, x in best.items()}
    print(json.dumps({"seconds": best, "times as fast as masked": ratios}, indent=1))


if __name__ == "__main__":
    main()
