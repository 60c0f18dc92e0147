"""FedFR on Omniglot: characters as identities."""

import os

from configs import base


def get_config():
    """480 classes pretrain, 400 federate on 40 clients, 84 are seen by nobody."""
    config = base.get_config()
    folder = os.environ.get("FEDFR_DATA", "../shared/data")
    config.data = {
        "name": "omniglot",
        "data_dir": f"{folder}/omniglot_background",
        "image_size": 28,
    }
    config.partition = {
        "num_clients": 40,
        "ids_per_client": 10,
        "num_global_ids": 480,
        "num_unseen_ids": 84,
    }
    config.model = {
        "name": "sphereface",
        "blocks": (1, 1, 1),
        "widths": (32, 64, 128),
        "embedding_dim": 128,
    }
    config.pretrain = {"epochs": 20, "batch_size": 64, "learning_rate": 0.05}
    config.federation = {
        "rounds": 5,
        "local_epochs": (4, 4, 2),
        "batch_size": 32,
        "evaluate_every": 1,
    }
    config.methods.fedavg.learning_rate = 0.005
    config.methods.fedfr.threshold = 0.6
    config.methods.fedfr.learning_rate = 0.005
    return config.lock()
