"""FedPer's figures in small, on CIFAR-10 with four classes per client.

fedfr train --config=configs/fedper/figures.py --workdir=runs/fedper_figures_k4

The case that experiments/fedper_figures/run.py starts from; it plays others. Results,
hardware and time: experiments/fedper_figures/README.md.
"""

from fedfr_jax.configs import base


def get_config():
    """Ten clients; every row of the figures, on a ResNet of four blocks."""
    config = base.get_config()
    config.task = "classification"
    config.data = {
        "name": "cifar10",
        "data_dir": base.data_dir("cifar10_jpg"),
        "image_size": 16,
    }
    config.partition = {
        "name": "by_class",
        "num_clients": 10,
        "classes_per_client": 4,
        "seed": config.get_ref("seed"),
    }
    config.model = {
        "name": "resnet",
        "blocks": (1, 1, 1, 1),
        "widths": (8, 16, 32, 64),
    }
    config.federation = {
        "rounds": 10,
        "local_epochs": 2,
        "batch_size": 32,
        "evaluate_every": 1,
    }
    config.methods = base.fedper_rows({"learning_rate": 0.05}, epochs=20)
    return config.lock()
