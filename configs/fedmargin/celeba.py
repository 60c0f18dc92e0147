"""FedMargin's CelebA: does somebody smile, a client per celebrity, LEAF's network.

fedfr train --config=configs/fedmargin/celeba.py --workdir=runs/fedmargin_celeba

Needs tensorflow-datasets (pip install 'fedfr_jax[tfds]'), which downloads CelebA. Not
run yet.
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
    config.data = {
        "name": "tfds",
        "dataset": "celeb_a",
        "split": "train+validation+test",
        "attribute": "Smiling",
        "image_size": 84,
        "min_images": 5,
    }
    config.partition = {"name": "natural", "test_fraction": 0.1}
    config.model = {"name": "leaf_celeba"}
    config.federation = {
        "rounds": 200,
        "cohort_size": 10,
        "local_epochs": 20,
        "batch_size": 10,
        "flip_probability": 0.0,
        "straggler_fraction": 0.5,
        "evaluate_every": 20,
    }
    config.methods = base.fedmargin_rows(10, central=CENTRAL, learning_rate=0.01)
    return config.lock()
