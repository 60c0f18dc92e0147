"""BigFace at the size of its slides: WebFace42M, R600 teacher, R240 student, R1.2K.

fedfr train --config=configs/bigface/paper.py:teacher --workdir=runs/bigface/r600
fedfr train --config=configs/bigface/paper.py --workdir=runs/bigface/r240

`:r1200` is the R1.2K, `:scratch` the student without its teacher. Needs WebFace42M as
arcface_torch packs it (train.rec, train.idx, property) under $FEDFR_DATA; streamed.
Not run: written for 32 devices (8,192 images a step; the authors had 32 to 64 V100).
`fedfr plan --config=bigface/paper --num_devices=32` says what a step needs; R1.2K with
256 images takes 23 GiB of an H200 (docs/explanation/accelerators.md). Devices of 32 GB
have to take --config.pretrain.gradient_accumulation_steps=4.

From the slides: LARS, rate 0.01 for 256 images and linear scaling, 256 images a rank,
weight decay 5e-4, 30 epochs, CosFace (s = 64, m = 0.4), masks on 0.35 of the images,
lambda = 9, classes sharded over the devices without sampling, statistics of each
device's own. Not given there, chosen here: one epoch of warm-up, a tenth of the rate
after 10, 18 and 24 epochs, both kinds of masks half and half, one of each per image,
which teacher and student see alike. The teacher's embeddings of all six views are
computed once, into a file of 261 GB.
"""

from fedfr_jax.configs import base

DATA = {"student": 240, "teacher": 600, "r1200": 1200, "scratch": 240}  # word: depth
EPOCHS = 30
PEOPLE, UNSEEN = 2_059_906, 2_000


def get_config(network="student"):
    """All people but 2,000 train; those are evaluated, with and without masks."""
    depth = base.chosen("the word after paper.py:", network, DATA)
    config = base.get_config()
    config.data = {
        "name": "recordio",
        "path": base.data_dir("webface42m/train.rec"),
        "image_size": 112,
    }
    config.partition = {
        "num_clients": 2,
        "ids_per_client": 2,
        "num_public_ids": PEOPLE - UNSEEN - 4,
        "num_unseen_ids": UNSEEN,
        "public_min_images": 2,
    }
    config.model = iresnet(depth)
    config.pretrain = {
        "epochs": EPOCHS,
        "batch_size": 32 * 256,
        "base_batch_size": 256,
        "optimizer": "lars",
        "learning_rate": 0.01,
        "weight_decay": 5e-4,
        "warmup_fraction": 1 / EPOCHS,
        "milestones": (10 / EPOCHS, 18 / EPOCHS, 24 / EPOCHS),
        "loss": {"name": "cosface", "scale": 64.0, "margin": 0.4},
        "augment": (
            {"name": "face_mask", "probability": 0.35, "fixed_per_image": True},
        ),
        "class_parallel": True,
        "class_chunk_size": 4096,
        "class_dtype": "bfloat16",
        "reduce_dtype": "bfloat16",
        "gather_dtype": "bfloat16",
        "sharding": (("kernel", "zero2"),),
    }
    if network == "student":
        teacher = {"weights": "runs/bigface/r600", "model": iresnet(DATA["teacher"])}
        cache = base.data_dir("webface42m/r600.safetensors")
        config.pretrain.distill = {"teacher": teacher, "cache": cache, "weight": 9.0}
    config.evaluation = {"fars": (1e-5, 1e-4), "masked_fars": 1e-5}
    config.methods = {}
    return config.lock()


def iresnet(depth):
    """An IResNet with stride 2 in the first convolution, as BigFace's figure has it."""
    return {
        "name": "iresnet",
        "depth": depth,
        "embedding_dim": 512,
        "dtype": "bfloat16",
        "stride_on": "first",
        "remat": True,
    }
