"""IResNet-50 on MS1MV3's 93,431 people, 112 pixels, over all devices that there are.

fedfr train --config=configs/bigface/r50_93k.py --workdir=runs/r50_93k

Needs InsightFace's ms1m-retinaface-t1 (train.rec, train.idx, property) under
$FEDFR_DATA; images that do not fit the devices are streamed. Not run yet: written for
eight GPUs, 1,024 images a step; one has to take
--config.pretrain.gradient_accumulation_steps=8.

arcface_torch's recipe with CosFace: SGD, 0.1 for 1,024 images, 20 epochs. Deviations:
rates drop at 10, 16 and 18 epochs after a warm-up instead of falling linearly; every
device's batch statistics are averaged, not the first one's kept.
"""

from fedfr_jax.configs import base


def get_config():
    """92,927 people train, 500 are seen by nobody; no clients take part."""
    config = base.get_config()
    config.data = {
        "name": "recordio",
        "path": base.data_dir("ms1m-retinaface-t1/train.rec"),
        "image_size": 112,
    }
    config.partition = {
        "num_clients": 2,
        "ids_per_client": 2,
        "num_public_ids": 92927,
        "num_unseen_ids": 500,
    }
    config.model = {
        "name": "iresnet",
        "depth": 50,
        "embedding_dim": 512,
        "dtype": "bfloat16",
    }
    config.pretrain = {
        "epochs": 20,
        "batch_size": 1024,
        "base_batch_size": 1024,
        "learning_rate": 0.1,
        "warmup_fraction": 0.05,
        "milestones": (0.5, 0.8, 0.9),
        "loss": {"name": "cosface", "scale": 64.0, "margin": 0.4},
        "class_parallel": True,
        "class_chunk_size": 4096,
        "class_dtype": "bfloat16",
        "reduce_dtype": "bfloat16",
        "sharding": (("kernel", "zero1"),),
    }
    config.evaluation = {"fars": (1e-5, 1e-4, 1e-3)}
    config.methods = {}
    return config.lock()
