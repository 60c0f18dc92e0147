"""Partial FC's synthetic table: IResNet-50 and up to 8 million people, 1,024 images.

fedfr plan --config=configs/bench/partial_fc.py:8000000 --device=v100 --num_devices=8

`fedfr bench partial-fc` plans all rows beside what arcface_torch's README printed on
eight V100 (docs/reference/board.md). Images are made, as theirs; 1,024 in a step over
all devices. --config.pretrain.class_sample_rate=1 is their column "model parallel". Not
run: no such machine was at hand.
"""

from fedfr_jax.configs import base

DATA = {str(n): n for n in (125_000, 1_400_000, 5_500_000, 8_000_000)}


def get_config(people="125000"):
    """A tenth of the other people's vectors takes part in a step."""
    num_people = base.chosen("the word after partial_fc.py:", people, DATA)
    config = base.get_config()
    config.data = {
        "name": "fake_data",
        "num_identities": num_people,
        "images_per_identity": 4,
        "image_size": 112,
    }
    config.partition = {
        "num_clients": 2,
        "ids_per_client": 2,
        "num_public_ids": num_people - 6,
        "num_unseen_ids": 2,
    }
    config.model = {
        "name": "iresnet",
        "depth": 50,
        "embedding_dim": 512,
        "dtype": "bfloat16",
    }
    config.pretrain = {
        "epochs": 1,
        "batch_size": 1024,
        "loss": {"name": "cosface", "scale": 64.0, "margin": 0.4},
        "class_parallel": True,
        "class_sample_rate": 0.1,
        "class_chunk_size": 65_536,
        "class_dtype": "bfloat16",
        "reduce_dtype": "bfloat16",
    }
    config.federation = {"data_placement": "stream"}
    config.methods = {}
    return config.lock()
