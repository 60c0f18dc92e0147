"""Segmentation of CamVid, Dirichlet(0.1) over the largest classes: FedAvg and central.

fedfr train --config=configs/fedmargin/camvid.py --workdir=runs/camvid
"""

from fedfr_jax.configs import base

CLIENTS = 8


def get_config():
    """367 images of 90 x 120 over 8 clients; a bound trained on all of them."""
    config = base.get_config()
    config.task = "segmentation"
    config.data = {
        "name": "camvid",
        "data_dir": base.data_dir("camvid_180x240"),
        "image_size": (90, 120),
    }
    config.partition = {
        "name": "dirichlet",
        "num_clients": CLIENTS,
        "alpha": 0.1,
        "min_examples": 8,
        "seed": config.get_ref("seed"),
    }
    config.model = {
        "name": "segmenter",
        "encoder": {
            "name": "resnet",
            "blocks": (1, 1, 1, 1),
            "widths": (16, 32, 64, 128),
        },
        "width": 32,
        "norm": "group",
        "groups": 8,
    }
    config.federation = {
        "rounds": 30,
        "local_epochs": 2,
        "batch_size": 8,
        "augment": ({"name": "pad_and_crop", "padding": 8},),
        "evaluate_every": 5,
    }
    rate = {"learning_rate": 0.05, "momentum": 0.9}
    config.methods = {
        "fedavg": rate,
        "central": {
            "kind": "central",
            "epochs": 60,
            "batch_size": 8,
            "learning_rate": 0.05,
            "augment": ({"name": "pad_and_crop", "padding": 8},),
        },
    }
    return config.lock()
