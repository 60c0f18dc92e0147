"""FedPer's figures 2 to 4 at the paper's size: CIFAR-100, ResNet-34.

fedfr train --config=configs/fedper/cifar100_resnet34.py --workdir=runs/resnet34

Needs tensorflow-datasets (pip install 'fedfr_jax[tfds]'), which downloads the set.
--config.partition.classes_per_client takes 80 and 100 too. Nobody has run it here:
experiments/fedper_figures has the same rows in small.
"""

from fedfr_jax.configs import base


def get_config():
    """Ten clients of 40 classes each; 16 basic blocks."""
    return base.fedper_paper("cifar100", 40, {"name": "resnet", "depth": 34}).lock()
