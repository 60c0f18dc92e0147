"""FedPer's figures 2 to 4 at the paper's size: CIFAR-100, MobileNet-v1.

fedfr train --config=configs/fedper/cifar100_mobilenet.py --workdir=runs/mobilenet

Needs tensorflow-datasets (pip install 'fedfr_jax[tfds]'), which downloads the set.
--config.partition.classes_per_client takes 80 and 100 too. Nobody has run it here:
experiments/fedper_figures has the same rows in small. --config.model.num_blocks=11 is
our reading of the paper's network. `:linear` after the file is section 4.4: one linear
layer gives the last block its input; FedPer keeps that block and the classifier.
"""

from fedfr_jax.configs import base

DATA = {
    "mobilenet": {"name": "mobilenet", "num_blocks": 13},
    "linear": {"name": "linear_base", "block": "mobilenet", "width": 1024, "side": 2},
}


def get_config(network="mobilenet"):
    """Ten clients of 40 classes each; 13 blocks, where the paper counts 11."""
    model = base.chosen("the word after cifar100_mobilenet.py:", network, DATA)
    return base.fedper_paper("cifar100", 40, model).lock()
