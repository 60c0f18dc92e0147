"""What the experiments of this folder train: a small network on MNIST by 20 clients."""

import pathlib

import jax.numpy as jnp
import numpy as np
import optax

import fedfr_jax as ff
from fedfr_jax.federated.aggregation import AGGREGATORS
from fedfr_jax.models.small_networks import mlp
from fedfr_jax.parts import Built, Member, Several, parse

NUM_CLIENTS, ROUNDS, SEED = 20, 15, 0
NUM_TRAIN, NUM_TEST = 4000, 2000
MODEL = mlp((28, 28, 1), hidden_dim=64, num_classes=10)
TARGET = 0  # of the backdoor


def load(path: pathlib.Path):
    """(training images, labels, test images, labels), floats in [-1, 1]."""
    with np.load(path) as arrays:
        is_test = arrays["official_test"]
        images, labels = arrays["images"], arrays["labels"].astype(np.int32)
    rng, parts = np.random.default_rng(SEED), []
    for rows, count in (
        (np.flatnonzero(~is_test), NUM_TRAIN),
        (np.flatnonzero(is_test), NUM_TEST),
    ):
        chosen = rng.choice(rows, count, replace=False)
        parts += [images[chosen, ..., None] / np.float32(127.5) - 1, labels[chosen]]
    return parts


def federate(images, labels) -> ff.FederatedDataset:
    """Clients who differ in their classes (Dirichlet, alpha 1) and sizes."""
    split = ff.partition.dirichlet(
        labels, num_clients=NUM_CLIENTS, alpha=1.0, min_examples=50, test_fraction=0.01
    )
    return ff.FederatedDataset.from_partition(images, labels, split)[0]


def logits(variables, images):
    """[B, M]."""
    return MODEL.apply(variables, images)[0]


def loss(variables, batch, key):
    """Softmax cross-entropy."""
    del key
    values = logits(variables, batch.images)
    losses = optax.softmax_cross_entropy_with_integer_labels(values, batch.labels)
    return ff.masked_mean(losses, batch.is_valid)


def fedavg() -> ff.Algorithm:
    """Clients count equally, as attackers could overstate their examples."""
    training = ff.LocalTraining(loss, ff.sgd(momentum=0.9), learning_rate=0.05)
    return ff.fedavg(training, weighting="uniform")


def with_links(algorithm, links) -> ff.Algorithm:
    """`algorithm` behind links as a config names them."""
    reader = Several(Built(Member(AGGREGATORS)))
    return ff.with_aggregation(algorithm, *parse(reader, links, "aggregation"))


def train(algorithm, data, test_images, test_labels, rounds=ROUNDS):
    """-> (server's variables, accuracy, run)."""
    import jax

    run = ff.init(
        algorithm,
        data,
        MODEL.init(jax.random.key(SEED)),
        batch_size=32,
        local_epochs=1,
        clients_per_device=NUM_CLIENTS // len(jax.devices()),
        seed=SEED,
    )
    for _ in range(rounds):
        run, _ = ff.run_round(run)
    found = logits(run.variables, jnp.asarray(test_images)).argmax(axis=1)
    return run.variables, float((found == test_labels).mean()), run
