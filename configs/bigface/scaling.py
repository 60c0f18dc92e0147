"""Thin IResNets for scaling laws: rendered people, Omniglot's characters, or LFW.

Rendered people have a mask on 0.35 of the images, as BigFace trains.

fedfr sweep --config=configs/bigface/scaling.py --workdir=runs/bigface_sweep \
    'model.widths=[(4, 8, 16, 32), (8, 16, 32, 64), (12, 24, 48, 96)]'
fedfr sweep --config=configs/bigface/scaling.py:omniglot --workdir=...

All sizes, data sets, masks, teachers and seeds: experiments/bigface_scaling/run.py,
whose README has times and results. Core seconds of a run on rendered people without
masks: 106 at widths from 8, 227 at widths from 24 (2026-11-23, jax 0.10.2).
"""

from fedfr_jax.configs import base

DATA = {  # word: data, people trained on and unseen, and the epochs
    "faces": (
        {
            "name": "synthetic_faces",
            "num_identities": 1204,
            "images_per_identity": 10,
            "image_size": 32,
            "difficulty": 0.8,
        },
        {"num_public_ids": 1000, "num_unseen_ids": 200},
        10,
    ),
    "omniglot": (
        {
            "name": "omniglot",
            "data_dir": base.data_dir("omniglot_background"),
            "image_size": 28,
        },
        {"num_public_ids": 760, "num_unseen_ids": 200},
        6,
    ),
    "lfw": (
        {"name": "lfw", "data_dir": base.data_dir("lfw_devtrain"), "image_size": 32},
        {
            "num_public_ids": 476,
            "num_unseen_ids": 120,
            "min_images": 10,
            "public_min_images": 3,
            "max_images": 30,
            "names": None,  # drawn by rows, as the recorded results are
        },
        20,
    ),
}


def get_config(data="faces"):
    """Pretraining alone, of a network whose widths are the axis of a sweep."""
    config = base.get_config()
    source, people, epochs = DATA[data]
    config.data = source
    config.partition = {
        "num_clients": 2,
        "ids_per_client": 2,
        **people,
        "seed": config.get_ref("seed"),
    }
    config.model = {
        "name": "iresnet",
        "blocks": (1, 1, 1, 1),
        "widths": (8, 16, 32, 64),
        "embedding_dim": 64,
    }
    config.pretrain = {
        "epochs": epochs,
        "batch_size": 64,
        "learning_rate": 0.1,
        "flip_probability": 0.0 if data == "omniglot" else 0.5,
        "checkpoint_every": 0,
    }
    config.evaluation = {"fars": (1e-3, 1e-2)}
    if data == "faces":
        config.pretrain.augment = ({"name": "face_mask", "fixed_per_image": True},)
        config.evaluation.masked_fars = (1e-3, 1e-2)
    config.methods = {}
    return config.lock()
