"""pfl-research's CIFAR-10 job: 1,000 users of 50 images, 50 of them a round, FedAvg.

fedfr train --config=configs/bench/pfl_cifar10.py --workdir=runs/pfl_cifar10

`:dp` after the file is its private row, epsilon 2 at delta 1e-6, whose noise is that of
1,000 users of a million in a round. For the whole set put it, as images or a .zip of
{train,test}/<class>/<number>, under $FEDFR_DATA/cifar10; --config.data.data_dir names
another folder, such as a part, of which a user has fewer images. `fedfr bench
pfl-cifar10` runs it beside pfl and Flower (docs/reference/board.md). Not run here with
the whole set. Source: apple/pfl-research, publications/pfl at bcf0331 and
benchmarks/image_classification/configs/baseline.yaml, arXiv:2404.06430. A user's images
are shuffled here.
"""

from fedfr_jax.configs import base

PRIVATE = {
    "clip_norm": 0.4,
    "epsilon": 2.0,
    "delta": 1e-6,
    "noise_cohort_size": 1000,
    "population": 1_000_000,
}
DATA = {"plain": {}, "dp": {"privacy": PRIVATE}}


def get_config(kind="plain"):
    """1,500 rounds of one local epoch in batches of ten, SGD at 0.1, unweighted."""
    private = base.chosen("the word after pfl_cifar10.py:", kind, DATA)
    config = base.get_config()
    config.task = "classification"
    config.data = {"name": "cifar10", "data_dir": base.data_dir("cifar10")}
    config.partition = {
        "name": "iid",
        "num_clients": 1000,
        "seed": config.get_ref("seed"),
    }
    config.model = {"name": "cnn", "dropout": (0.25, 0.5)}
    config.federation = {
        "rounds": 1500,
        "cohort_size": 50,
        "local_epochs": 1,
        "batch_size": 10,
        "flip_probability": 0.0,
        "evaluate_every": 10,
        "checkpoint_every": 100,
        "sampling": "poisson" if private else "fixed",
    }
    row = {"algorithm": {"name": "fedavg", "weighting": "uniform"}}
    config.methods = {"fedavg": {**row, "learning_rate": 0.1, **private}}
    return config.lock()
