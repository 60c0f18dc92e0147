"""The MNIST rows of FedMargin's table in small.

fedfr train --config=configs/fedmargin/table_mnist.py --workdir=runs/table_mnist

All seeds and stragglers: experiments/fedmargin_tables/run.py. Results, hardware and
time: experiments/fedmargin_tables/README.md.
"""

from fedfr_jax.configs import base


def get_config():
    """60 rounds of three epochs, ten of 100 users."""
    config = base.get_config()
    config.task = "classification"
    config.data = {"name": "mnist", "data_dir": base.data_dir("mnist_pfl20")}
    config.partition = {"name": "power_law", "num_clients": 100}
    config.model = {"name": "mlp", "hidden_dim": 32}
    config.federation = {
        "rounds": 60,
        "cohort_size": 10,
        "local_epochs": 3,
        "batch_size": 20,
        "flip_probability": 0.0,
        "evaluate_every": 1,
        "checkpoint_every": 0,
    }
    config.methods = base.fedmargin_rows(1, learning_rate=0.03)
    return config.lock()
