"""The center to measure FedReID against: Market-1501 as "bag of tricks" trains it.

fedfr train --config=configs/fedreid/strong_center.py --workdir=runs/strong_center

Luo et al. 2019 (BoT), as its code has it; fast-reid's form of it reaches 94.4 rank-1
and 86.1 mAP. Not measured: Market-1501 is given out on request only.
resnet50-0676ba61.pth is torchvision's file.
"""

from fedfr_jax.configs import base

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def get_config():
    """ResNet-50, BNNeck, last stride 1, batches of 16 people x 4 images, 120 epochs."""
    config = base.get_config()
    config.task = "reid"
    path = base.data_dir("reid/market1501")
    config.data = {"name": "market1501", "path": path, "image_size": (256, 128)}
    config.partition = {"name": "by_camera"}
    config.model = {
        "name": "reid",
        "depth": 50,
        "weights": base.data_dir("reid/resnet50-0676ba61.pth"),
        "last_stride": 1,
        "neck": "bnneck",
    }
    in_bytes = lambda values: tuple(255 * x for x in values)
    config.methods = {
        "strong_center": {
            "kind": "central",
            "epochs": 120,
            "batch_size": 64,
            "identities_per_batch": 16,
            "optimizer": "adam_coupled",
            "learning_rate": 3.5e-4,
            "weight_decay": 5e-4,
            "schedule_unit": "epoch",
            "warmup_fraction": 10 / 120,
            "warmup_start_factor": 0.01,
            "milestones": (40 / 120, 70 / 120),
            "loss": {"label_smoothing": 0.1, "triplet_weight": 1.0},
            "flip_probability": 0.5,
            "augment": (
                {"name": "pad_and_crop", "padding": 10},
                {"name": "normalize", "mean": in_bytes(MEAN), "std": in_bytes(STD)},
                {"name": "random_erasing", "fill": 0.0},
            ),
        }
    }
    return config.lock()
