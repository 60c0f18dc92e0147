"""The Synthetic(1,1) rows of FedMargin's table in small.

fedfr train --config=configs/fedmargin/table_synthetic.py --workdir=runs/table_synthetic

All seeds and stragglers: experiments/fedmargin_tables/run.py. Results, hardware and
time: experiments/fedmargin_tables/README.md.
"""

from fedfr_jax.configs import base


def get_config():
    """30 rounds of five epochs, ten of 30 users."""
    config = base.get_config()
    config.task = "classification"
    config.data = {"name": "synthetic", "alpha": 1.0, "beta": 1.0}
    config.partition = {"name": "natural", "test_fraction": 0.1}
    config.model = {"name": "mlp", "hidden_dim": 32}
    config.federation = {
        "rounds": 30,
        "cohort_size": 10,
        "local_epochs": 5,
        "batch_size": 10,
        "flip_probability": 0.0,
        "evaluate_every": 1,
        "checkpoint_every": 0,
    }
    config.methods = base.fedmargin_rows(3, learning_rate=0.01)
    return config.lock()
