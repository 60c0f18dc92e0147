"""FedFR's tables in small on LFW's DevTrain people alone.

python experiments/fedfr_tables/run.py --config=configs/fedfr/table_lfw.py \
    --workdir=runs/table_lfw

Clients' people come from where the pretraining people come from, so that what FedAvg
adds is no adaptation to another set's pictures; table_faces.py mixes two sets.
Results, hardware and time, and the studies that the clients' rate, the threshold and
the epochs are of: experiments/fedfr_tables/README.md.
"""

from fedfr_jax.configs import base


def get_config(row=""):
    """300 people pretrain, 200 federate on 20 clients, 120 are seen by nobody.

    Args:
      row: the only row of the table that is trained, "" all.
    """
    config = base.get_config()
    config.data = {
        "name": "lfw",
        "data_dir": base.data_dir("lfw_devtrain"),
        "image_size": 28,
    }
    config.partition = {
        "num_clients": 20,
        "ids_per_client": 10,
        "num_public_ids": 300,
        "num_unseen_ids": 120,
        "min_images": 6,
        "public_min_images": 3,
        "max_images": 14,
        "names": None,  # drawn by rows, as the recorded results are
        "seed": config.get_ref("seed"),
    }
    config.model = base.small_network()
    config.pretrain = base.short_pretraining(20, checkpoint_every=0)
    config.federation = {
        "rounds": 3,
        "local_epochs": (6, 5, 4),
        "batch_size": 16,
        "checkpoint_every": 0,
    }
    rate = 3e-4
    config.methods = base.table_rows(
        {"epochs": 4, "learning_rate": rate},
        equal_epochs=(27, 23, 18),
        terms={"hard_negative_threshold": 0.35},
        images={"learning_rate": 1e-3},
        learning_rate=rate,
        decay_epochs=(5, 4, 3),
    )
    # Of table 2, tuned on the validation split as the rates are.
    config.methods["cosface_branch"]["algorithm"]["branch"]["weight"] = 0.1
    config.methods["finetune"]["algorithm"]["adaptation"]["learning_rate"] = 1e-4
    config.methods["distill"]["algorithm"]["adaptation"]["learning_rate"] = 1e-3
    if row:
        config.methods = {row: config.methods[row]}
    return config.lock()
