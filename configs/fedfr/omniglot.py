"""FedFR on Omniglot: characters as identities, drawers as their photographs.

fedfr train --config=configs/fedfr/omniglot.py --workdir=runs/omniglot

Minutes on 2 CPU cores. Not measured in this form: figures over seeds, of the same
characters at table_omniglot.py's settings, are in experiments/fedfr_tables/README.md.

The threshold of 0.5 decides only where less than 120 public images lie above it; else
the cap does, which takes the most similar (table_omniglot.py's network finds 3,421).

Pretraining is short on purpose: after 12 epochs, on 40 clients of 10 characters, local
training on 12 images per character lowered every method below the pretrained network.
"""

from fedfr_jax.configs import base


def get_config():
    """480 classes pretrain, 400 federate on 20 clients, 84 are seen by nobody."""
    config = base.get_config()
    config.data = {
        "name": "omniglot",
        "data_dir": base.data_dir("omniglot_background"),
        "image_size": 28,
    }
    config.partition = {
        "num_clients": 20,
        "ids_per_client": 20,
        "num_public_ids": 480,
        "num_unseen_ids": 84,
    }
    config.model = base.small_network()
    config.pretrain = base.short_pretraining(3, flip_probability=0.0)
    config.federation = base.short_rounds(4, flip_probability=0.0)
    config.methods = base.small_methods()
    return config.lock()
