"""FedFR on real faces: LFW's View-1 DevTrain people, aligned by their landmarks.

fedfr train --config=configs/fedfr/lfw.py --workdir=runs/lfw

2 CPU cores, the Omniglot run beside it: 552 s. Personalised TAR@FAR=1e-3, mean over
clients: pretrained 0.140, FedAvg 0.161, FedFR 0.208 (2026-11-20, seed 0, jax 0.10.2).
"""

import os

from configs import base


def get_config():
    """400 people pretrain, 80 federate on 10 clients, 120 are seen by nobody."""
    config = base.get_config()
    folder = os.environ.get("FEDFR_DATA", "../shared/data")
    config.data = {
        "name": "lfw",
        "data_dir": f"{folder}/lfw_devtrain",
        "image_size": 48,
    }
    config.partition = {
        "num_clients": 10,
        "ids_per_client": 8,
        "num_global_ids": 400,
        "num_unseen_ids": 120,
        "min_images": 10,
        "global_min_images": 3,
        "max_images": 30,
    }
    config.model = {
        "name": "sphereface",
        "blocks": (1, 1, 1),
        "widths": (32, 64, 128),
        "embedding_dim": 128,
    }
    config.pretrain = {"epochs": 15, "optimizer": "adam", "learning_rate": 2e-3}
    config.federation = {
        "rounds": 5,
        "local_epochs": (4, 4, 3),
        "batch_size": 32,
        "evaluate_every": 1,
    }
    for name in ("fedavg", "fedfr"):
        config.methods[name].learning_rate = 1e-3
        config.methods[name].decay_epochs = (3, 3, 2)
    config.methods.fedfr.threshold = 0.5
    config.methods.fedfr.max_hard_negatives = 120
    return config.lock()
