"""Federated MNIST: 100 clients with two digits each train one network by FedAvg.

    python examples/mnist.py mnist.npz

Without a file the script downloads MNIST (11 MB) into the current folder.
"""

import pathlib
import sys
import urllib.request

import jax
import numpy as np
import optax

import fedfr_jax as ff

URL = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"


def load(path):
    """Images [T, 28, 28, 1] in [-1, 1], labels [T], and which are for testing [T]."""
    if not pathlib.Path(path).exists():
        urllib.request.urlretrieve(URL, path)
    with np.load(path) as file:
        x = np.concatenate([file["x_train"], file["x_test"]])
        y = np.concatenate([file["y_train"], file["y_test"]])
        is_test = np.arange(len(x)) >= len(file["x_train"])
    return x[..., None].astype(np.float32) / 127.5 - 1, y.astype(np.int32), is_test


def main(path="mnist.npz", num_clients=100, cohort_size=20, rounds=20):
    """Train; returns the accuracy on the test images."""
    x, y, is_test = load(path)
    # McMahan et al. 2017: sort by digit, cut into shards, give every client two.
    split = ff.partition.shards(y, num_clients=num_clients, is_test=is_test)
    train, test = ff.FederatedDataset.from_partition(x, y, split)

    model = ff.MODELS["cnn"](x.shape[1:], widths=(8, 16), num_classes=10)

    def loss(variables, batch, key):
        logits, batch_stats = model.apply(variables, batch.images, True, key=key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        return ff.masked_mean(losses, batch.is_valid), (batch_stats, {})

    def logits(variables, x):
        return model.apply(variables, x)[0]

    algorithm = ff.fedavg(ff.LocalTraining(loss, optax.sgd, learning_rate=0.05))
    run = ff.init(
        algorithm,
        train,
        model.init(jax.random.key(0)),
        cohort_size=cohort_size,
        batch_size=20,
        local_epochs=1,
    )
    for number in range(1, rounds + 1):
        run, metrics = ff.run_round(run)
        print(f"round {number}: loss {metrics['loss'].mean():.3f}")
    accuracy = ff.evaluate(run, logits, test)["accuracy"]
    print(f"test accuracy of the global model: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main(*sys.argv[1:])
