"""Personalized layers: clients that disagree about labels keep their last layer.

    python examples/personal_layers.py

Forty clients have 27 handwritten digits each, and every client gives the ten digits
labels of its own. One global model cannot learn that. With a personal classifier
(FedPer, Arivazhagan et al. 2019) the clients share features and keep their labels, and
do better than alone. The digits come with scikit-learn.
"""

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import fedfr_jax as ff


def digits_by_client(num_clients=40):
    """(Training data, test data); labels are permuted by client."""
    digits = load_digits()
    x = (digits.images.reshape(-1, 64) / 8 - 1).astype(np.float32)
    rng = np.random.default_rng(0)
    client_ids = rng.permutation(np.arange(len(x)) % num_clients)
    labels = np.stack([rng.permutation(10) for _ in range(num_clients)])
    y = labels[client_ids, digits.target]
    is_test = rng.random(len(x)) < 0.4
    return tuple(
        ff.FederatedDataset.from_client_ids(x[part], y[part], client_ids[part])
        for part in (~is_test, is_test)
    )


def main(rounds=20):
    """Train with and without personal layers; returns {name: mean client accuracy}."""
    train, test = digits_by_client()
    model = ff.MODELS["mlp"]((64,), hidden_dim=64, num_classes=10)

    def loss(variables, batch, key):
        logits, batch_stats = model.apply(variables, batch.images, True, key=key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        return ff.masked_mean(losses, batch.is_valid), (batch_stats, {})

    def logits(variables, x):
        return model.apply(variables, x)[0]

    fedavg = ff.fedavg(ff.LocalTraining(loss, optax.sgd, learning_rate=0.3))
    methods = {
        "fedavg": fedavg,
        "personal classifier": ff.with_personal_layers(fedavg, "params/classifier"),
        "local training": ff.with_personal_layers(fedavg, "."),  # nothing is shared
    }
    found = {}
    for name, algorithm in methods.items():
        variables = model.init(jax.random.key(0))
        run = ff.init(algorithm, train, variables, batch_size=9, local_epochs=4)
        for _ in range(rounds):
            run, _ = ff.run_round(run)
        found[name] = ff.evaluate(run, logits, test)["accuracy_of_clients"]
        print(f"{name}: {found[name]:.3f}")
    return found


if __name__ == "__main__":
    main()
