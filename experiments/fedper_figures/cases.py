"""Cases: a data set, a network, classes per client, rounds, images per client."""

from typing import NamedTuple

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
    "mnist": {
        "name": "mnist",
        "data_dir": base.data_dir("mnist_pfl20"),
        "image_size": 16,
    },
}
NETWORKS = {
    "resnet": {"name": "resnet", "blocks": (1, 1, 1, 1), "widths": (8, 16, 32, 64)},
    "mobilenet": {"name": "mobilenet", "num_blocks": 8, "width": 0.25},
    "mlp": {"name": "mlp", "hidden_dim": 64},
    # The last block's input of the ResNet above, from one linear layer.
    "linear": {"name": "linear_base", "width": 64, "side": 2},
    # That of the MobileNet above.
    "linear_mobilenet": {
        "name": "linear_base",
        "block": "mobilenet",
        "width": 128,
        "side": 2,
    },
}
FEDPER = "fedper_2"  # the personal part of the paper's figures: a block, the classifier
LAYERS = ("fedavg", "fedper_1", FEDPER, "fedper_3", "fedper_4")
PAIR = ("fedavg", FEDPER)
OTHERS = ("finetune", "local", "central")
LONG = (*PAIR, "finetune", "local")  # of the cases of more rounds
ALONE = (*PAIR, "local")  # of the cases of many and of few images
CLASSIFIER = ("fedavg", "fedper_1", "local")  # of a network with one layer below
SUBSET = "class_subset"  # of class_subset.py
ROUNDS, CLIENTS = 10, 10  # of a case that says nothing else
# Clients that no round has seen are judged as they come, and after this.
FINETUNE = {"learning_rate": 0.05, "epochs": 2}
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
    "cifar100 mobilenet k=80": PAIR,
    "cifar100 mobilenet k=100": PAIR,
    "cifar10 resnet k=4 r=40": LONG,
    "cifar10 linear k=4 r=40": (FEDPER,),
    "cifar100 resnet k=40 r=40": LONG,
    "cifar100 linear k=40 r=40": (FEDPER,),
    "cifar10 resnet k=4 unseen=5": PAIR,
    "cifar100 resnet k=40 unseen=5": PAIR,
    "mnist resnet k=4 n=600": ALONE,
    "mnist resnet k=4 n=5000": ALONE,
    "mnist mlp k=4 r=100 n=600": CLASSIFIER,
    "mnist mlp k=4 r=100 n=5000": CLASSIFIER,
}


def personal_row(case: str) -> str:
    """The row that stands for FedPer in a case."""
    return FEDPER if FEDPER in CASES[case] else CLASSIFIER[1]


class Parts(NamedTuple):
    """What a case's name says."""

    data: str
    network: str
    k: int  # classes per client
    r: int = ROUNDS
    unseen: int = 0  # further clients, which no round sees
    n: int = 0  # training images per client; 0: all that the set has


def parts_of(case: str) -> Parts:
    """The parts of a case's name.

    >>> parts_of("cifar10 resnet k=4 r=40")
    Parts(data='cifar10', network='resnet', k=4, r=40, unseen=0, n=0)
    """
    data, network, *numbers = case.split()
    named = dict(number.split("=") for number in numbers)
    return Parts(data, network, **{name: int(x) for name, x in named.items()})


def of_all_classes(case: str) -> str:
    """The same case with every class at every client.

    >>> of_all_classes("cifar100 resnet k=40 r=40")
    'cifar100 resnet k=100 r=40'
    """
    k = parts_of(case).k
    return case.replace(f"k={k}", f"k={k * 10 // 4}")


def config_of(config, case: str, seed: int):
    """`config`, configs/fedper/figures.py or one like it, as a case with a seed."""
    parts = parts_of(case)
    with config.unlocked():
        config = config.copy_and_resolve_references()
        config.seed = config.partition.seed = seed
        config.partition.classes_per_client = parts.k
        config.data, config.model = DATA[parts.data], NETWORKS[parts.network]
        if parts.data == "mnist":
            config.federation.flip_probability = 0.0  # digits
        if parts.n:  # ten clients and ten classes: as many of a class as of a client
            whole = config.data.to_dict()
            config.data = {"name": SUBSET, "per_class": parts.n, "of": whole}
            config.data.seed = seed
        if parts.r != ROUNDS:
            config.federation.rounds = parts.r
        if parts.unseen:
            config.partition.num_clients = CLIENTS + parts.unseen
            config.partition.unseen_clients = parts.unseen
            config.evaluation.finetune = FINETUNE
        rows = {name: config.methods[name] for name in CASES[case]}
        config.methods = rows
    return config
