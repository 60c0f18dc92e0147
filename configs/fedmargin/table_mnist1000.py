"""Rows on FedProx's 1000 users of MNIST for FedMargin's table in small.

fedfr train --config=configs/fedmargin/table_mnist1000.py --workdir=runs/mnist1000

All seeds: experiments/fedmargin_tables/run.py. Results, hardware and time:
experiments/fedmargin_tables/README.md.
"""

from fedfr_jax.configs import base

ROWS = ("fedavg", "fairavg", "fedatt", "fedprox")
ROWS += ("fedmargin", "fedmargin_counts", "fedmargin_hypothesis")


def get_config():
    """100 rounds of 20 epochs, ten of 1000 users; the rest is fedmargin/mnist's."""
    config = base.get_config()
    config.task = "classification"
    data_dir = base.data_dir("mnist_pfl20")
    config.data = {"name": "mnist", "data_dir": data_dir, "is_test": None}
    config.partition = {"name": "power_law", "num_clients": 1000}
    config.model = {"name": "logistic"}
    config.federation = {
        "rounds": 100,
        "cohort_size": 10,
        "local_epochs": 20,
        "batch_size": 10,
        "flip_probability": 0.0,
        "evaluate_every": 1,
        "checkpoint_every": 0,
    }
    rows = base.fedmargin_rows(10, learning_rate=0.01, optimizer=base.MCLR)
    config.methods = {name: rows[name] for name in ROWS}
    return config.lock()
