"""FedFR's tables in small on faces: LFW's DevTrain people and FEI's.

python experiments/fedfr_tables/run.py --config=configs/fedfr/table_faces.py \
    --workdir=runs/table_faces

Results, hardware and time: experiments/fedfr_tables/README.md.
"""

import os

from fedfr_jax.configs import base


def get_config():
    """400 of LFW pretrain, 200 of both federate, 120 of LFW are seen by nobody."""
    config = base.get_config()
    folder = os.environ.get("FEDFR_DATA", "../shared/data")
    config.data = {
        "name": "concat",
        "sources": {
            "lfw": {
                "name": "lfw",
                "data_dir": f"{folder}/lfw_devtrain",
                "image_size": 28,
            },
            "fei": {
                "name": "fei",
                "data_dir": f"{folder}/fei28",
                "image_size": 28,
            },
        },
    }
    config.partition = {
        "num_clients": 20,
        "ids_per_client": 10,
        "num_public_ids": 400,
        "num_unseen_ids": 120,
        "min_images": 14,
        "public_min_images": 3,
        "max_images": 14,
        "names": None,  # drawn by rows, as the recorded results are
        "public_ids_from": "lfw",
        "unseen_ids_from": "lfw",
        "seed": config.get_ref("seed"),
    }
    config.model = {
        "name": "sphereface",
        "blocks": (1, 1, 1),
        "widths": (32, 64, 128),
        "embedding_dim": 128,
    }
    config.pretrain = {
        "epochs": 20,
        "optimizer": "adam",
        "learning_rate": 2e-3,
        "checkpoint_every": 0,
    }
    config.federation = {
        "rounds": 3,
        "local_epochs": (6, 5, 4),
        "batch_size": 16,
        "checkpoint_every": 0,
    }
    config.methods = base.table_rows(
        {"epochs": 4, "learning_rate": 1e-3},
        equal_epochs=(12, 10, 8),
        terms={"hard_negative_threshold": 0.45},
        learning_rate=1e-3,
        decay_epochs=(5, 4, 3),
    )
    return config.lock()
