"""FedAwS on Fashion-MNIST: ten clients of one class each.

fedfr train --config=configs/classification/fedaws.py --workdir=runs/fedaws

Cross-entropy sees one class at each client and learns nothing that FedAvg could
average; pulling features to their own class alone lets all classes fall together,
unless the server keeps them apart.
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
        "flip": 0.0,
        "evaluate_every": 5,
    }
    rate = {"learning_rate": 0.05}
    config.methods = {
        "fedavg": rate,
        "fedaws": {"algorithm": "fedaws", **rate},
        "pulled_only": {"algorithm": "fedaws", "strength": 0.0, **rate},
    }
    return config.lock()
