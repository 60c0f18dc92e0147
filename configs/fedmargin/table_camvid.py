"""Rows on CamVid for FedMargin's figures 7 and 8 in small: a Dirichlet split.

fedfr train --config=configs/fedmargin/table_camvid.py --workdir=runs/table_camvid

All alphas and seeds: experiments/fedmargin_tables/camvid.py. Results, hardware and
time: experiments/fedmargin_tables/README.md.
"""

from fedfr_jax.configs import base

CROP = {"name": "pad_and_crop", "padding": 4}
LEFT_OUT = ("fedatt_spectral", "fedmargin_counts")  # for an hour on two cores


def get_config():
    """367 images of 60 x 80 over 8 clients: 12 rounds of two epochs."""
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
    }
    config.model = {
        "name": "segmenter",
        "encoder": {"name": "resnet", "blocks": (1, 1, 1), "widths": (16, 32, 64)},
        "width": 32,
        "norm": "group",
        "groups": 8,
    }
    config.federation = {
        "rounds": 12,
        "local_epochs": 2,
        "batch_size": 8,
        "augment": (CROP,),
        "evaluate_every": 3,
        "checkpoint_every": 0,
    }
    config.evaluation = {"pictures": 0}
    rate = {"learning_rate": 0.05, "momentum": 0.9}
    rows = base.fedmargin_rows(1, **rate)
    config.methods = {
        **{name: row for name, row in rows.items() if name not in LEFT_OUT},
        "central": {
            "kind": "central",
            "epochs": 24,
            "batch_size": 8,
            "learning_rate": 0.05,
            "augment": (CROP,),
        },
    }
    return config.lock()
