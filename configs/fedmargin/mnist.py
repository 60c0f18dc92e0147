"""FedMargin's MNIST: 1000 users of two digits each, sizes by a power law.

fedfr train --config=configs/fedmargin/mnist.py --workdir=runs/fedmargin_mnist

The users are those of FedProx, to whom all 70,000 images are dealt; a tenth of each
user's is held out. The network is their logistic regression, see synthetic.py. 100 of
its 200 rounds are in experiments/fedmargin_tables/README.md (`mnist1000`).
--config.evaluation.representation='{"max_images": 500}' adds AMM to each evaluation;
with "reference", a central run's work folder, MMD to it.
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
    data_dir = base.data_dir("mnist_pfl20")
    config.data = {"name": "mnist", "data_dir": data_dir, "is_test": None}
    config.partition = {"name": "power_law", "num_clients": 1000}
    config.model = {"name": "logistic"}
    config.federation = {
        "rounds": 200,
        "cohort_size": 10,
        "local_epochs": 20,
        "batch_size": 10,
        "flip_probability": 0.0,
        "straggler_fraction": 0.5,
        "evaluate_every": 20,
    }
    config.methods = base.fedmargin_rows(
        10, central=CENTRAL, learning_rate=0.01, optimizer=base.MCLR
    )
    del config.methods["fedper"], config.methods["fedrep"]
    return config.lock()
