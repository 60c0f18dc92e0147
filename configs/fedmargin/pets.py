"""Oxford-IIIT pets against their background: FedMargin and FedAvg.

fedfr train --config=configs/fedmargin/pets.py --workdir=runs/pets

Not measured: TensorFlow Datasets downloads and prepares the set when it is not there.
"""

from fedfr_jax.configs import base


def get_config():
    """3680 images of 96 x 96, Dirichlet(0.1) over the 37 breeds to 20 clients.

    Classes are pet, background and border.
    """
    config = base.get_config()
    config.task = "segmentation"
    config.data = {
        "name": "tfds",
        "dataset": "oxford_iiit_pet",
        "test_split": "test",
        "image_size": 96,
    }
    config.partition = {
        "name": "dirichlet",
        "num_clients": 20,
        "alpha": 0.1,
        "min_examples": 20,
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
        "norm_groups": 8,
    }
    config.federation = {
        "rounds": 30,
        "local_epochs": 1,
        "batch_size": 16,
        "augment": ({"name": "affine", "degrees": 10, "scale": 0.2},),
        "evaluate_every": 5,
    }
    rate = {"learning_rate": 0.05, "momentum": 0.9}
    config.methods = {
        "fedavg": rate,
        "fedmargin": {
            **rate,
            "algorithm": {"name": "fedmargin", "prototype_momentum": 0.9},
        },
    }
    return config.lock()
