"""FedMargin's FEMNIST: 200 users of three of the letters a to j each.

fedfr train --config=configs/fedmargin/femnist.py --workdir=runs/fedmargin_femnist

Needs tensorflow-datasets (pip install 'fedfr_jax[tfds]'), which downloads EMNIST. The
users are those of FedProx. Not run yet.
"""

from fedfr_jax.configs import base

CENTRAL = {"epochs": 200, "batch_size": 64}


def get_config():
    """200 rounds of 20 epochs; --config.federation.straggler_fraction=0.8 for other
    shares.

    --config.evaluation.target_accuracy=A tells the first round with A, such as 0.8 of
    what the central row has in the end.
    """
    config = base.get_config()
    config.task = "classification"
    config.data = {"name": "femnist10"}
    config.partition = {"name": "lognormal_sizes", "num_clients": 200}
    config.model = {"name": "leaf_femnist"}
    config.federation = {
        "rounds": 200,
        "cohort_size": 10,
        "local_epochs": 20,
        "batch_size": 10,
        "flip_probability": 0.0,
        "straggler_fraction": 0.5,
        "evaluate_every": 1,
    }
    config.methods = base.fedmargin_rows(10, central=CENTRAL, learning_rate=0.01)
    return config.lock()
