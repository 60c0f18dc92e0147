"""FedFR's table in small at the paper's numbers of people, on rendered faces.

python experiments/fedfr_tables/run.py --config=configs/fedfr/table_rendered.py \
    --workdir=runs/table_rendered --seeds=0

The paper's clients have 100 classes each, which is what its branch and its hard
negatives were made for; images are of 32 pixels and there are ten of each person.
Results, hardware and time: experiments/fedfr_tables/README.md.
"""

from fedfr_jax.configs import base

ROWS = (
    "local",
    "local_equal",
    "local_negatives",
    "fedavg",
    "fedavg_equal",
    "hard_negatives",
    "fedfr",
    "central",
)


def get_config():
    """6,000 people pretrain, 4,000 federate on 40 clients, 500 are seen by nobody."""
    config = base.get_config()
    config.data = {
        "name": "synthetic_faces",
        "num_identities": 10500,
        "images_per_identity": 10,
        "image_size": 32,
        "difficulty": 0.8,
        "seed": 0,
    }
    config.partition = {
        "num_clients": 40,
        "ids_per_client": 100,
        "num_public_ids": 6000,
        "num_unseen_ids": 500,
        "seed": config.get_ref("seed"),
    }
    config.model = base.small_network()
    config.pretrain = base.short_pretraining(20, checkpoint_every=5)
    config.federation = {
        "rounds": 3,
        "local_epochs": (4, 3, 3),
        "batch_size": 32,
        "checkpoint_every": 1,
    }
    config.evaluation = {"fars": (1e-5, 1e-4, 1e-3), "fpirs": (1e-3, 1e-2)}
    rate = 3e-4  # which holds in its study, as the threshold does
    rows = base.table_rows(
        {"epochs": 3, "learning_rate": rate},
        equal_epochs=(9, 7, 7),
        terms={"hard_negative_threshold": 0.575},
        learning_rate=rate,
        decay_epochs=(3, 2, 2),
    )
    config.methods = {name: rows[name] for name in ROWS}
    return config.lock()
