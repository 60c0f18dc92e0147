"""FedAvg on EMNIST's 62 classes, 100 clients, the CNN of fedjax and TFF.

fedfr train --config=configs/classification/emnist.py --workdir=runs/emnist

Needs tensorflow-datasets (pip install 'fedfr_jax[tfds]'), which downloads the set.
Not run here.
"""

from fedfr_jax.configs import base


def get_config():
    """Ten of 100 clients a round, batches of 20, one local epoch."""
    config = base.get_config()
    config.task = "classification"
    config.data = {
        "name": "tfds",
        "dataset": "emnist/byclass",
        "split": "train",
        "test_split": "test",
    }
    config.partition = {
        "name": "dirichlet",
        "num_clients": 100,
        "alpha": 0.5,
        "seed": config.get_ref("seed"),
    }
    config.model = {"name": "cnn"}
    config.federation = {
        "rounds": 100,
        "cohort_size": 10,
        "local_epochs": 1,
        "batch_size": 20,
        "flip_probability": 0.0,
        "evaluate_every": 10,
    }
    config.methods = {"fedavg": {"learning_rate": 0.1}}
    return config.lock()
