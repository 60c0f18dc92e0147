"""FedFR on rendered faces, the embedded default: pretraining, FedAvg, FedFR.

fedfr train --config=configs/fedfr/demo.py --workdir=runs/demo

2 CPU cores: 186 core seconds, 8 minutes beside other work. One run of seed 0, mean over
clients of the personalized TAR@FAR=1e-3: pretrained 0.341, FedAvg 0.329, FedFR 0.382
(2026-11-24, commit 3983511, jax 0.10.2; experiments/benchmarks/results/demo.json). What
holds over seeds is in experiments/fedfr_tables/README.md.

Every client is given 120 hard negatives in every round: the cap, those most similar, so
the threshold of 0.5 decides nothing here.
"""

from fedfr_jax.configs import base


def get_config():
    """200 people pretrain, 100 federate on 10 clients, 60 are seen by nobody."""
    config = base.get_config()
    config.data = {
        "name": "synthetic_faces",
        "num_identities": 360,
        "images_per_identity": 20,
        "image_size": 32,
        "difficulty": 0.8,
    }
    config.partition = {
        "num_clients": 10,
        "ids_per_client": 10,
        "num_public_ids": 200,
        "num_unseen_ids": 60,
    }
    config.model = base.small_network()
    config.pretrain = base.short_pretraining(6)
    config.federation = base.short_rounds(6)
    config.methods = base.small_methods()
    return config.lock()
