"""Ways to fine-tune a trained network over clients, on characters of Omniglot.

fedfr train --config=configs/classification/adaptation.py:base --workdir=runs/base
fedfr train --config=configs/classification/adaptation.py:one_shot \
    --config.pretrain.init=runs/base/base --workdir=runs/one_shot

The word after the colon is a key of DATA. `base` trains a small ResNet on 764
characters, centrally; the others start from its weights, `after` from those of
runs/one_shot/gaussian. Of the other 200 characters 50 clients have 64 images each, most
of them of a few characters. Times and results: experiments/adaptation/README.md.
"""

from fedfr_jax.configs import base

NUM_CLASSES, NUM_OF_BASE = 964, 764
HEAD = {"frozen": {"all_but_blocks": 1}}
LORA = {"adapter": {"name": "lora", "rank": 4, "alpha": 8, "targets": "stage"}}


def of_base():
    """The base: one network on all images of its characters."""
    move = {"name": "affine", "degrees": 10, "scale": 0.1, "translate": 0.1}
    return {
        "base": {
            "kind": "central",
            "epochs": 12,
            "batch_size": 64,
            "optimizer": "adam",
            "learning_rate": 2e-3,
            "flip_probability": 0.0,
            "augment": (move,),
        }
    }


def one_shot():
    """The classifier in closed form, of what clients send once."""
    row = lambda name: {"algorithm": {"name": "one_shot", "classifier": name}}
    names = ("means", "gaussian", "ridge")
    return {name: {"learning_rate": 0.0, **row(name), **HEAD} for name in names}


def head():
    """FedAvg of the classifier, on features that are computed once."""
    return {"head": {"learning_rate": 0.3, **HEAD}}


def network(**rates):
    """FedAvg of LoRA and the classifier, or of everything."""
    rates["clip_norm"] = 1.0  # without it a rate of 0.01 diverges from the Gaussians
    return {"lora": {**LORA, **rates}, "full": rates}


def from_base():
    """The new classifier moves ten times as fast as the trained layers."""
    return network(learning_rate=0.03, learning_rate_multipliers={"^fc/": 10.0})


DATA = {  # whether of the base's characters, rounds, methods
    "base": (True, 1, of_base),
    "one_shot": (False, 1, one_shot),
    "head": (False, 50, head),
    "network": (False, 6, from_base),
    "after": (False, 3, lambda: network(learning_rate=0.01)),
}


def get_config(data="one_shot"):
    """All clients in every round, one local epoch."""
    is_base, rounds, methods = base.chosen("data", data, DATA)
    config = base.get_config()
    config.task = "classification"
    config.data = {
        "name": "omniglot",
        "data_dir": base.data_dir("omniglot_background"),
        "classes": (0, NUM_OF_BASE) if is_base else (NUM_OF_BASE, NUM_CLASSES),
    }
    config.partition = {
        "name": "dirichlet",
        "num_clients": 50,
        "alpha": 0.3,
        "seed": config.get_ref("seed"),
    }
    config.model = {
        "name": "resnet",
        "blocks": (1, 1, 1, 1),
        "widths": (16, 32, 64, 128),
    }
    config.federation = {
        "rounds": rounds,
        "local_epochs": 1,
        "batch_size": 16,
        "flip_probability": 0.0,
        "evaluate_every": rounds,
    }
    config.methods = methods()
    return config.lock()
