"""Rows on CamVid for FedMargin's figures 5 to 8 in small: a capped Dirichlet split.

fedfr train --config=configs/fedmargin/table_camvid.py --workdir=runs/table_camvid

All alphas and seeds: experiments/fedmargin_tables/camvid.py. Results, hardware and
time: experiments/fedmargin_tables/README.md.
"""

from fedfr_jax.configs import base

CROP = {"name": "pad_and_crop", "padding": 4}
ROWS = ("fedavg", "fairavg", "fedatt", "fedprox")  # others are left out for time
ROWS += ("fedmargin", "fedmargin_counts", "fedmargin_hypothesis")


def get_config():
    """367 images of 60 x 80 over 8 clients: 12 rounds of two epochs.

    An image has one of very few largest classes. Without `max_examples` a small alpha
    gives one client most of them (222 of 367 at 0.01), which is nearly central
    training for a method that weighs by images.
    """
    config = base.get_config()
    config.task = "segmentation"
    config.data = {
        "name": "camvid",
        "data_dir": base.data_dir("camvid_180x240"),
        "image_size": (60, 80),
    }
    config.partition = {
        "name": "dirichlet",
        "num_clients": 8,
        "alpha": 0.1,
        "min_examples": 8,
        "max_examples": 50,
    }
    config.model = {
        "name": "segmenter",
        "encoder": {"name": "resnet", "blocks": (1, 1, 1), "widths": (16, 32, 64)},
        "width": 32,
        "norm": "group",
        "norm_groups": 8,
    }
    config.federation = {
        "rounds": 12,
        "local_epochs": 2,
        "batch_size": 8,
        "augment": (CROP,),
        "evaluate_every": 3,
        "checkpoint_every": 0,
    }
    config.evaluation = {"num_visualized": 0}
    rate = {"learning_rate": 0.05, "momentum": 0.9}
    rows = base.fedmargin_rows(1, margins={"prototype_momentum": 0.9}, **rate)
    config.methods = {
        **{name: rows[name] for name in ROWS},
        "central": {
            "kind": "central",
            "epochs": 24,
            "batch_size": 8,
            "learning_rate": 0.05,
            "augment": (CROP,),
        },
    }
    return config.lock()
