"""What is played: a case is a data set, a network and classes per client."""

from fedfr_jax.configs import base

DATA = {
    "cifar10": {
        "name": "cifar10",
        "data_dir": base.data_dir("cifar10_jpg"),
        "image_size": 16,
    },
    "cifar100": {
        "name": "cifar100",
        "data_dir": base.data_dir("cifar100_6k"),
        "image_size": 16,
    },
}
NETWORKS = {
    "resnet": {"name": "resnet", "blocks": (1, 1, 1, 1), "widths": (8, 16, 32, 64)},
    "mobilenet": {"name": "mobilenet", "num_blocks": 8, "width": 0.25},
    # The last block's input of the ResNet above, from one linear layer.
    "linear": {"name": "linear_base", "width": 64, "side": 2},
    # That of the MobileNet above.
    "linear_mobilenet": {
        "name": "linear_base",
        "top": "mobilenet",
        "width": 128,
        "side": 2,
    },
}
FEDPER = "fedper_2"  # the personal part of the paper's figures: a block, the classifier
LAYERS = ("fedavg", "fedper_1", FEDPER, "fedper_3", "fedper_4")
PAIR = ("fedavg", FEDPER)
OTHERS = ("finetune", "local", "central")
# case: its rows, in the order of the figures
CASES = {
    "cifar10 resnet k=4": (*LAYERS, *OTHERS),
    "cifar10 resnet k=8": PAIR,
    "cifar10 resnet k=10": PAIR,
    "cifar10 linear k=4": (FEDPER,),
    "cifar10 mobilenet k=4": LAYERS,
    "cifar10 mobilenet k=8": PAIR,
    "cifar10 mobilenet k=10": PAIR,
    "cifar100 resnet k=40": (*LAYERS, *OTHERS),
    "cifar100 resnet k=80": PAIR,
    "cifar100 resnet k=100": PAIR,
    "cifar100 linear k=40": (FEDPER,),
    "cifar100 mobilenet k=40": PAIR,
    "cifar100 linear_mobilenet k=40": (FEDPER,),
}


def parts_of(case: str) -> tuple[str, str, int]:
    """(data, network, classes per client).

    >>> parts_of("cifar10 resnet k=4")
    ('cifar10', 'resnet', 4)
    """
    data, network, classes = case.split()
    return data, network, int(classes.removeprefix("k="))


def config_of(config, case: str, seed: int):
    """`config`, configs/fedper/figures.py or one like it, as a case with a seed."""
    data, network, classes = parts_of(case)
    with config.unlocked():
        config = config.copy_and_resolve_references()
        config.seed = config.partition.seed = seed
        config.partition.classes_per_client = classes
        config.data, config.model = DATA[data], NETWORKS[network]
        rows = {name: config.methods[name] for name in CASES[case]}
        config.methods = rows
    return config
