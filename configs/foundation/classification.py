"""DINOv2 of 22 million numbers, fine-tuned over a thousand clients of CIFAR-100.

fedfr convert --input=model.safetensors --output=$FEDFR_DATA/dinov2_small.safetensors
fedfr train --config=configs/foundation/classification.py --workdir=runs/foundation

Where model.safetensors comes from says docs/how-to/bases.md; its images are enlarged to
112 pixels here, 64 patches. Not run at this size; the tutorial in docs/ runs the same
rows on a small network.
"""

from fedfr_jax.configs import base


def get_config():
    """Fifty of a thousand clients a round; a linear probe, and LoRA in three ways."""
    config = base.get_config()
    config.task = "classification"
    config.data = {
        "name": "tfds",
        "dataset": "cifar100",
        "split": "train",
        "test_split": "test",
        "image_size": 112,
    }
    config.partition = {
        "name": "dirichlet",
        "num_clients": 1000,
        "alpha": 0.3,
        "min_examples": 10,
        "seed": config.get_ref("seed"),
    }
    config.model = base.DINOV2_SMALL
    config.pretrain = {"init": base.data_dir("dinov2_small.safetensors")}
    config.federation = {
        "rounds": 30,
        "cohort_size": 50,
        "local_epochs": 1,
        "batch_size": 10,
        "flip_probability": 0.5,
        "augment": (base.IMAGENET_PIXELS,),
        "evaluate_every": 10,
    }
    config.methods = base.adapter_rows("qkv|proj", learning_rate=0.05)
    return config.lock()
