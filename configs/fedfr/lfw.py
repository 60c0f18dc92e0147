"""FedFR on real faces: LFW's View-1 DevTrain people, aligned by their landmarks.

fedfr train --config=configs/fedfr/lfw.py --workdir=runs/lfw

Minutes on 2 CPU cores. Not measured in this form: figures over seeds, of the same
people at table_lfw.py's settings, are in experiments/fedfr_tables/README.md.

The threshold of 0.5 decides only where less than 120 public images lie above it; else
the cap does, which takes the most similar.
"""

from fedfr_jax.configs import base


def get_config():
    """400 people pretrain, 80 federate on 10 clients, 120 are seen by nobody."""
    config = base.get_config()
    config.data = {
        "name": "lfw",
        "data_dir": base.data_dir("lfw_devtrain"),
        "image_size": 48,
    }
    config.partition = {
        "num_clients": 10,
        "ids_per_client": 8,
        "num_public_ids": 400,
        "num_unseen_ids": 120,
        "min_images": 10,
        "public_min_images": 3,
        "max_images": 30,
        "names": None,  # drawn by rows, as the recorded results are
    }
    config.model = base.small_network()
    config.pretrain = base.short_pretraining(15)
    config.federation = base.short_rounds(5)
    config.methods = base.small_methods()
    return config.lock()
