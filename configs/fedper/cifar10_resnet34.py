"""FedPer's figures 2 to 4 at the paper's size: CIFAR-10, ResNet-34.

fedfr train --config=configs/fedper/cifar10_resnet34.py --workdir=runs/resnet34

Needs tensorflow-datasets (pip install 'fedfr_jax[tfds]'), which downloads the set.
--config.partition.classes_per_client takes 8 and 10 too. Nobody has run it here:
experiments/fedper_figures has the same rows in small.
"""

from fedfr_jax.configs import base


def get_config():
    """Ten clients of 4 classes each; 16 basic blocks."""
    return base.fedper_paper("cifar10", 4, {"name": "resnet", "depth": 34}).lock()
