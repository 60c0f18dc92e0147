"""FedPer's figures 2 to 4 at the paper's size: CIFAR-100, ResNet-34.

fedfr train --config=configs/fedper/cifar100_resnet34.py --workdir=runs/resnet34

Needs tensorflow-datasets (pip install 'fedfr_jax[tfds]'), which downloads the set.
--config.partition.classes_per_client takes 80 and 100 too. Nobody has run it here:
experiments/fedper_figures has the same rows in small. `:linear` after the file is
section 4.4: one linear layer gives the last block its input; FedPer keeps that block
and the classifier.
"""

from fedfr_jax.configs import base

DATA = {
    "resnet34": {"name": "resnet", "depth": 34},
    "linear": {"name": "linear_base", "width": 512, "side": 4},
}


def get_config(network="resnet34"):
    """Ten clients of 40 classes each; 16 basic blocks."""
    model = base.chosen("the word after cifar100_resnet34.py:", network, DATA)
    return base.fedper_paper("cifar100", 40, model).lock()
