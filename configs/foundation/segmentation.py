"""A ResNet-50 of ImageNet as a segmenter's encoder, adapted to pets by 20 clients.

fedfr train --config=configs/foundation/segmentation.py --workdir=runs/foundation_pets

config.pretrain.init is torchvision's file, see docs/how-to/bases.md; TensorFlow
Datasets downloads the images. Not run.
"""

from fedfr_jax.configs import base


def get_config():
    """3680 images of 128 x 128; LoRA in the encoder's convolutions, a whole decoder."""
    config = base.get_config()
    config.task = "segmentation"
    config.data = {
        "name": "tfds",
        "dataset": "oxford_iiit_pet",
        "test_split": "test",
        "image_size": 128,
    }
    config.partition = {
        "name": "dirichlet",
        "num_clients": 20,
        "alpha": 0.1,
        "min_examples": 20,
        "seed": config.get_ref("seed"),
    }
    config.model = {"name": "segmenter", "encoder": {"name": "resnet", "depth": 50}}
    config.pretrain = {"init": base.data_dir("resnet50-11ad3fa6.pth")}
    config.federation = {
        "rounds": 30,
        "local_epochs": 1,
        "batch_size": 16,
        "augment": (base.IMAGENET_PIXELS,),
        "evaluate_every": 5,
    }
    decoder = r"params/(up\d|classifier)/"
    config.methods = base.adapter_rows("stage[34]", head=decoder, learning_rate=0.05)
    return config.lock()
