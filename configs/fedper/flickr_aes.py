"""FedPer's figure 7 at the paper's size: FLICKR-AES, 30 raters, MobileNet-v1.

fedfr train --config=configs/fedper/flickr_aes.py --workdir=runs/fedper_flickr_aes

Needs the set, which its authors hand out for research
(https://github.com/alanspike/personalizedImageAesthetics): its folder is flickr_aes
under FEDFR_DATA, with the ratings file and the images in 40K/. Nobody has run it here.
"""

from fedfr_jax.configs import base


def get_config():
    """A rater is a client, five scores are the classes, 4/5 of the ratings train."""
    config = base.get_config()
    config.task = "classification"
    config.data = {"name": "flickr_aes", "data_dir": base.data_dir("flickr_aes")}
    config.partition = {
        "name": "natural",
        "num_clients": 30,
        "test_fraction": 0.2,
        "seed": config.get_ref("seed"),
    }
    config.model = {"name": "mobilenet", "stem": "imagenet"}
    config.federation = {
        "rounds": 100,
        "local_epochs": 4,
        "batch_size": 4,
        "evaluate_every": 5,
    }
    config.methods = base.fedper_rows({"learning_rate": 0.01}, epochs=400)
    return config.lock()
