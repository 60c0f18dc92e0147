"""FedPer on CIFAR-10: K_P 0 to 4 against FedAvg and local training, k classes each.

fedfr train --config=configs/fedper/cifar10.py --workdir=runs/fedper_cifar10

2 CPU cores: 298 s. Accuracy, mean over clients: FedAvg 0.331, K_P 1 to 4 0.533, 0.536,
0.545, 0.533, local 0.549 (2026-11-23, seed 0, jax 0.10.2). After six rounds of one
seed FedPer beats FedAvg and not local training; the paper has 100 rounds. Clients'
layers all start as the first network's; the paper's algorithm 1 draws them for each
client, as "init_per_client": True does, which the rows of configs/fedper/figures.py
have.
"""

from fedfr_jax.configs import base


def get_config():
    """Ten clients of four classes each; FedAvg is K_P = 0."""
    config = base.get_config()
    config.task = "classification"
    config.data = {"name": "cifar10", "data_dir": base.data_dir("cifar10_jpg")}
    config.partition = {
        "name": "by_class",
        "num_clients": 10,
        "classes_per_client": 4,
        "seed": config.get_ref("seed"),
    }
    config.model = {
        "name": "resnet",
        "blocks": (1, 1, 1, 1),
        "widths": (16, 32, 64, 128),
    }
    config.federation = {
        "rounds": 6,
        "local_epochs": 2,
        "batch_size": 32,
        "evaluate_every": 1,
    }
    rate = {"learning_rate": 0.05}
    config.methods = {
        "fedavg": rate,
        **{f"fedper_{k}": {**rate, "personal": {"blocks": k}} for k in range(1, 5)},
        "local": {**rate, "personal": "."},
    }
    return config.lock()
