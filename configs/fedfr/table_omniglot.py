"""FedFR's tables in small on Omniglot: characters as identities.

python experiments/fedfr_tables/run.py --config=configs/fedfr/table_omniglot.py \
    --workdir=runs/table_omniglot
"""

import os

from configs import base


def get_config():
    """480 classes pretrain, 200 federate on 20 clients, 200 are seen by nobody."""
    config = base.get_config()
    folder = os.environ.get("FEDFR_DATA", "../shared/data")
    config.data = {
        "name": "omniglot",
        "data_dir": f"{folder}/omniglot_background",
        "image_size": 28,
    }
    config.partition = {
        "num_clients": 20,
        "ids_per_client": 10,
        "num_global_ids": 480,
        "num_unseen_ids": 200,
        "seed": config.get_ref("seed"),
    }
    config.model = {
        "name": "sphereface",
        "blocks": (1, 1, 1),
        "widths": (16, 32, 64),
        "embedding_dim": 64,
    }
    config.pretrain = {
        "epochs": 16,
        "optimizer": "adam",
        "learning_rate": 2e-3,
        "flip": 0.0,
        "checkpoint_every": 0,
    }
    config.federation = {
        "rounds": 3,
        "local_epochs": (6, 5, 4),
        "batch_size": 16,
        "flip": 0.0,
        "checkpoint_every": 0,
    }
    config.methods = base.table_rows(
        {"epochs": 4, "learning_rate": 1e-3},
        learning_rate=1e-3,
        decay_epochs=(5, 4, 3),
        threshold=0.6,
        max_hard_negatives=200,
    )
    return config.lock()
