"""FedAwS on Fashion-MNIST: ten clients of one class each.

fedfr train --config=configs/classification/fedaws.py --workdir=runs/fedaws

2 CPU cores beside other work: 1,000 s, of which 350 s of one core's time are its own.
Accuracy: FedAvg 0.649, FedAwS 0.648, pulled_only 0.553 (2026-11-24, seed 0, jax
0.10.2). Pulling features to their own class alone brings classes near each other, and
the server's step that keeps them apart is worth ten points; clients who compare with
the other classes' rows by cross-entropy do as well here, but must be sent those rows.
"""

from fedfr_jax.configs import base


def get_config():
    """FedAvg, FedAwS, and FedAwS whose server does not keep the classes apart."""
    config = base.get_config()
    config.task = "classification"
    config.data = {
        "name": "fashion_mnist",
        "data_dir": base.data_dir("fashion_mnist"),
    }
    config.partition = {
        "name": "by_class",
        "num_clients": 10,
        "classes_per_client": 1,
        "seed": config.get_ref("seed"),
    }
    config.model = {"name": "cnn", "widths": (16, 32), "embedding_dim": 64}
    config.federation = {
        "rounds": 20,
        "local_epochs": 1,
        "batch_size": 50,
        "flip_probability": 0.0,
        "evaluate_every": 5,
    }
    rate = {"learning_rate": 0.05}
    config.methods = {
        "fedavg": rate,
        "fedaws": {"algorithm": "fedaws", **rate},
        "pulled_only": {"algorithm": {"name": "fedaws", "lam": 0.0}, **rate},
    }
    return config.lock()
