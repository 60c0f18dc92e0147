"""One network on 480 Omniglot characters, augmented, judged on 84 that nobody saw.

fedfr train --config=configs/central/omniglot.py --workdir=runs/central_omniglot

2 CPU cores: 10 s an epoch at best, of 60. Seed 0 took 12 minutes and reached a generic
TAR@FAR=1e-3 of 0.66 on characters that nobody saw, see
experiments/benchmarks/results/central_omniglot.json; what other seeds reach after 40
epochs is `pretrained` in Omniglot's table of experiments/fedfr_tables/README.md.
"""

from fedfr_jax.configs import base


def get_config():
    """No clients take part: pretraining alone, with rotation, scale and shift."""
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
    config.pretrain = {
        "epochs": 60,
        "optimizer": "adam",
        "learning_rate": 2e-3,
        "flip_probability": 0.0,
        "augment": ({"name": "affine", "degrees": 10, "scale": 0.1, "translate": 0.1},),
        "checkpoint_every": 10,
    }
    config.methods = {}
    return config.lock()
