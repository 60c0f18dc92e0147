"""CamVid, Dirichlet(0.1) over the largest classes of images: FedMargin and FedAvg.

fedfr train --config=configs/fedmargin/camvid.py --workdir=runs/camvid

2 CPU cores, shared with other work: 844 s (2026-11-23, jax 0.10.2). At 90 x 120 pixels
no row finds poles, pedestrians or cyclists. The rows are measured, at partition.alpha
0.01, 0.1, 1 and 10 and at half the size, by experiments/fedmargin_tables.
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
        "fedmargin": {**rate, "algorithm": "fedmargin"},
        "central": {
            "kind": "central",
            "epochs": 60,
            "batch_size": 8,
            "learning_rate": 0.05,
            "augment": ({"name": "pad_and_crop", "padding": 8},),
        },
    }
    return config.lock()
