"""FedFR at the paper's size: MS1M-ArcFace, 40 clients x 100 identities, SphereFace-64.

fedfr train --config=configs/fedfr/ms1m_40x100.py --workdir=runs/ms1m_40x100
fedfr plan --config=configs/fedfr/ms1m_40x100.py [--methods=fedfr]

Needs InsightFace's faces_emore (train.rec, train.idx, property) under
$FEDFR_DATA/faces_emore; images that do not fit the devices are streamed. The plan needs
neither, see experiments/fedfr_tables/README.md.

Unlike the paper's, the generic protocol is on 500 more identities of the set;
--config.evaluation.templates=FOLDER adds IJB-C, where you have it. Unpublished, so
ours: the pretraining schedule (the one that the released config suggests, at 256 images
a step), 5 epochs of adaptation, the weight of a CosFace branch. Every row has FedFR's
batch and decay; the released FedAvg has 64 and none.
"""

from fedfr_jax.configs import base


def get_config():
    """6,000 people pretrain, 4,000 federate, 500 are seen by nobody."""
    config = base.get_config()
    config.seed = 100
    config.data = {
        "name": "recordio",
        "path": base.data_dir("faces_emore/train.rec"),
        "image_size": 112,
    }
    config.partition = {"name": "ms1m", "num_unseen_ids": 500}
    config.model = {"name": "sphereface", "depth": 64, "embedding_dim": 512}
    config.pretrain = {
        "epochs": 16,
        "batch_size": 256,
        "learning_rate": 0.025,  # 0.05 is for 512 images
        "milestones": (5 / 16, 13 / 16),
    }
    config.federation = {
        "rounds": 20,
        "local_epochs": (10, 8, 6, 4),
        "batch_size": 256,
        "drop_last": True,
    }
    config.evaluation = {
        "fars": (1e-6, 1e-5, 1e-4),
        "fpirs": (1e-5, 1e-4),
    }
    config.methods = base.table_rows(
        {"epochs": 5, "learning_rate": 1e-3},
        equal_epochs=(15, 12, 9, 6),
        terms={
            "hard_negative_threshold": 0.4,
            "contrastive_weight": 5.0,
        },
        learning_rate=1e-3,
        decay_epochs=(8, 6, 4, 3),
    )
    return config.lock()
