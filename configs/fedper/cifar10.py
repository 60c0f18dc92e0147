"""FedPer on CIFAR-10: K_P 0 to 4 against FedAvg and local training, k classes each.

fedfr train --config=configs/fedper/cifar10.py --workdir=runs/fedper_cifar10

2 CPU cores: 298 s (2026-11-23, jax 0.10.2). Accuracies of these rows over seeds, after
ten rounds (the paper has 100), are in experiments/fedper_figures/README.md.
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
