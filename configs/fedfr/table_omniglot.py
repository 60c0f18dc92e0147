"""FedFR's tables in small on Omniglot: characters as identities.

python experiments/fedfr_tables/run.py --config=configs/fedfr/table_omniglot.py \
    --workdir=runs/table_omniglot

Results, hardware and time, and the studies that the clients' rate and the threshold are
of: experiments/fedfr_tables/README.md.
"""

from fedfr_jax.configs import base

WARP = ({"name": "affine", "degrees": 10, "scale": 0.1, "translate": 0.1},)


def get_config():
    """480 classes pretrain, 400 federate on 10 clients, 84 are seen by nobody."""
    config = base.get_config()
    config.data = {
        "name": "omniglot",
        "data_dir": base.data_dir("omniglot_background"),
        "image_size": 28,
    }
    config.partition = {
        "num_clients": 10,
        "ids_per_client": 40,
        "num_public_ids": 480,
        "num_unseen_ids": 84,
        "seed": config.get_ref("seed"),
    }
    config.model = {
        "name": "sphereface",
        "blocks": (1, 1, 1),
        "widths": (32, 64, 128),
        "embedding_dim": 128,
    }
    config.pretrain = {
        "epochs": 40,
        "optimizer": "adam",
        "learning_rate": 2e-3,
        "flip_probability": 0.0,
        "augment": WARP,
        "checkpoint_every": 0,
    }
    config.federation = {
        "rounds": 3,
        "local_epochs": (4, 3, 3),
        "batch_size": 16,
        "flip_probability": 0.0,
        "augment": WARP,
        "checkpoint_every": 0,
    }
    rate = 1e-4
    config.methods = base.table_rows(
        {"epochs": 4, "learning_rate": rate},
        equal_epochs=(9, 7, 7),
        terms={"hard_negative_threshold": 0.7},
        images={"learning_rate": 3e-4},
        central={"epochs": 27},  # as many steps as pretraining
        learning_rate=rate,
        decay_epochs=(3, 2, 2),
    )
    return config.lock()
