"""Rows on Fashion-MNIST for FedMargin's table in small: a Dirichlet split.

fedfr train --config=configs/fedmargin/table_fashion.py --workdir=runs/table_fashion

All seeds and stragglers: experiments/fedmargin_tables/run.py. Results, hardware and
time: experiments/fedmargin_tables/README.md.
"""

from fedfr_jax.configs import base


def get_config():
    """Ten rounds of two epochs, ten of 50 clients."""
    config = base.get_config()
    config.task = "classification"
    config.data = {
        "name": "fashion_mnist",
        "data_dir": base.data_dir("fashion_mnist"),
    }
    config.partition = {"name": "dirichlet", "num_clients": 50, "alpha": 0.1}
    config.model = {"name": "cnn", "widths": (8, 16), "embedding_dim": 32}
    config.federation = {
        "rounds": 10,
        "cohort_size": 10,
        "local_epochs": 2,
        "batch_size": 20,
        "flip_probability": 0.0,
        "evaluate_every": 1,
        "checkpoint_every": 0,
    }
    config.methods = base.fedmargin_rows(1, learning_rate=0.05)
    return config.lock()
