"""What examples/real_clients.py runs at the server and at each client."""

import os

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import fedfr_jax as ff
from fedfr_jax import flower
from fedfr_jax.tasks.faces.frozen_features import ComputedFeatures
from fedfr_jax.tasks.faces.loss import face_loss, on_variables

NUM_CLIENTS = 3


def own_digits(client):
    """Examples of one client, (x, y). A real one reads files that only it has."""
    digits = load_digits()
    x = (digits.images.reshape(-1, 64) / 8 - 1).astype(np.float32)
    part = slice(client, None, NUM_CLIENTS)
    return x[part][:400], digits.target[part][:400]


def methods():
    """{name: (algorithm, variables that it starts from)}."""
    model = ff.MODELS["mlp"]((64,), hidden_dim=32, num_classes=10)

    def loss(variables, batch, key):
        logits, batch_stats = model.apply(variables, batch.images, True, key=key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        return ff.masked_mean(losses, batch.is_valid), (batch_stats, {})

    training = ff.LocalTraining(loss, optax.sgd, learning_rate=0.1)
    fedavg = ff.fedavg(training)
    noise = {"clip_norm": 1.0, "noise_multiplier": 0.5, "delta": 0.01}
    algorithms = {
        "fedavg": fedavg,
        "scaffold": ff.scaffold(training, num_clients=NUM_CLIENTS),
        "fedper": ff.with_personal_layers(fedavg, "params/classifier"),
        "quantized": ff.with_aggregation(
            fedavg, ff.AGGREGATORS["quantize"](range=512.0)
        ),
        "private": ff.private(fedavg, ff.Privacy(cohort_size=NUM_CLIENTS, **noise)),
    }
    variables = model.init(jax.random.key(0))
    found = {name: (algorithm, variables) for name, algorithm in algorithms.items()}
    return {**found, "fedfr": fedfr_generic()}


def fedfr_generic():
    """FedFR's generic part: CosFace over a client's own classes and the public ones,
    and the contrastive term against the backbone that it trained last.
    """
    backbone = ff.MODELS["mlp"]((64,), hidden_dim=32, num_classes=16)

    def features(variables, x):
        return backbone.apply(variables, x, False)[0]

    def reference_features(shared, previous, client):
        return ComputedFeatures(features, shared, previous)

    loss = face_loss(on_variables(backbone), contrastive_weight=5.0)
    training = ff.LocalTraining(loss, optax.sgd, learning_rate=0.002)
    fedfr = ff.fedfr(training, reference_features=reference_features)
    start = backbone.init(jax.random.key(0))
    classes = 0.1 * jax.random.normal(jax.random.key(1), (14, 16))
    params = {"backbone": start["params"], "head": classes[:10], "phi": classes[10:]}
    return ff.with_personal_layers(fedfr, "params/head"), {**start, "params": params}


OPTIONS = {"batch_size": 20, "local_epochs": 2, "seed": 1}


def build(config):
    """The deployment that the run's config asks for, the same on both sides."""
    algorithm, variables = methods()[config["method"]]
    given = {**OPTIONS, "num_clients": NUM_CLIENTS}
    return flower.build_deployment(algorithm, own_digits, variables, **given)


def save(number, variables):
    """After every round: keep what the server has."""
    leaves = jax.tree.leaves(variables)
    np.savez(os.environ.get("SAVE_TO", "variables.npz"), *leaves)


server = flower.server_app(build, evaluate_fn=save)
client = flower.client_app(build)
