"""The way large face networks are trained, in small: 3,000 rendered people.

fedfr train --config=configs/bigface/rendered.py --workdir=runs/bigface_rendered

Classes are cut over the devices and a third of them is drawn in each step until the
last epoch; gradients and momentum are cut, blocks computed again.

2 CPU cores with ten other jobs on them: 12 minutes (2026-11-23, jax 0.10.2). Figures
over sizes and seeds, of thin IResNets on fewer people, are in
experiments/bigface_scaling/README.md.
"""

from fedfr_jax.configs import base


def get_config():
    """Pretraining alone, judged on 200 people that nobody saw."""
    config = base.get_config()
    config.data = {
        "name": "synthetic_faces",
        "num_identities": 3204,
        "images_per_identity": 8,
        "image_size": 32,
        "difficulty": 0.8,
        "seed": 0,
    }
    config.partition = {
        "num_clients": 2,
        "ids_per_client": 2,
        "num_public_ids": 3000,
        "num_unseen_ids": 200,
        "seed": config.get_ref("seed"),
    }
    config.model = {
        "name": "iresnet",
        "blocks": (1, 2, 3, 1),
        "widths": (16, 32, 64, 128),
        "embedding_dim": 128,
        "remat": "convolutions",
    }
    config.pretrain = {
        "epochs": 4,
        "batch_size": 128,
        "base_batch_size": 128,
        "learning_rate": 0.1,
        "gradient_accumulation_steps": 2,
        "class_parallel": True,
        "class_chunk_size": 512,
        "class_sample_rate": (0.33, 0.33, 0.33, 1.0),
        "sharding": (("kernel", "zero2"),),
    }
    config.evaluation = {"fars": (1e-3, 1e-2)}
    config.methods = {}
    return config.lock()
