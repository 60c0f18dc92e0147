"""FedMargin's Synthetic(1,1): ten of 30 users a round, half of them stragglers.

fedfr train --config=configs/fedmargin/synthetic.py --workdir=runs/fedmargin_synthetic

The set is drawn, nothing is downloaded. The network is the logistic regression of the
FedProx code, whose features, of which FedMargin takes prototypes, are the logits;
FedPer and FedRep have no base to share there. Not run at this size yet; the table in
small, with a hidden layer, is in experiments/fedmargin_tables.
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
    config.data = {"name": "synthetic", "alpha": 1.0, "beta": 1.0}
    config.partition = {"name": "natural", "test_fraction": 0.1}
    config.model = {"name": "logistic"}
    config.federation = {
        "rounds": 200,
        "cohort_size": 10,
        "local_epochs": 20,
        "batch_size": 10,
        "flip_probability": 0.0,
        "straggler_fraction": 0.5,
        "evaluate_every": 1,
    }
    config.methods = base.fedmargin_rows(
        10, central=CENTRAL, learning_rate=0.01, optimizer=base.MCLR
    )
    del config.methods["fedper"], config.methods["fedrep"]
    return config.lock()
