"""FedScale's FEMNIST on simulated time: rounds of 50 clients, or FedBuff, resnet18.

fedfr train --config=configs/bench/fedscale_femnist.py:sync --workdir=runs/sync
fedfr train --config=configs/bench/fedscale_femnist.py:fedbuff --workdir=runs/fedbuff

Needs under $FEDFR_DATA femnist.npz (images [T, 28, 28] uint8, labels, clients: the
writer of each) and, of FedScale's benchmark/dataset/data/device_info, the files
fedscale/client_device_capacity and fedscale/client_behave_trace. `:sync_standin` and
`:fedbuff_standin` need mnist_pfl20 instead: MNIST over 200 clients, a small CNN, drawn
devices and hours. `fedfr bench fedscale-femnist` trains both kinds and says which data
they had (docs/reference/board.md). Not run here with FEMNIST.

Source: SymbioticLab/FedScale, benchmark/configs/femnist and async_fl. Deviations: an
epoch instead of five steps; all writers, not only those of 21 images or more.
"""

from fedfr_jax.configs import base

FEDBUFF = {
    "asynchronous": {
        "name": "fedbuff",
        "concurrency": 100,
        "buffer_size": 50,
        "max_staleness": 3,
    }
}
KINDS = {"sync": {"over_selection": 1.3}, "fedbuff": FEDBUFF}
RESNET18_GFLOPS = 0.9  # of a forward pass of 28 x 28 pixels
DATA = {
    f"{kind}{standin}": None for kind in KINDS for standin in ("", "_standin")
}  # words after the file


def get_config(word="sync"):
    """1,000 rounds; batches of 20, SGD at 0.05, evaluated every ten rounds."""
    base.chosen("the word after fedscale_femnist.py:", word, DATA)
    kind, _, standin = word.partition("_")
    config = base.get_config()
    config.task = "classification"
    parts = of_mnist(config) if standin else of_femnist()
    config.data, config.partition, config.model, devices = parts
    config.federation = {
        "rounds": 1000,
        "cohort_size": 50,
        "local_epochs": 1,
        "batch_size": 20,
        "flip_probability": 0.0,
        "evaluate_every": 10,
        "checkpoint_every": 100,
        "systems": {**devices, **KINDS[kind]},
    }
    row = {"algorithm": {"name": "fedavg", "weighting": "uniform"}}
    config.methods = {"fedavg": {**row, "learning_rate": 0.05}}
    return config.lock()


def of_femnist():
    """Data, partition, model and devices, with FedScale's own traces."""
    path, folder = base.data_dir("femnist.npz"), base.data_dir("fedscale")
    profiles = {
        "name": "fedscale",
        "path": f"{folder}/client_device_capacity",
        "forward_gflops": RESNET18_GFLOPS,
    }
    availability = {"name": "fedscale", "path": f"{folder}/client_behave_trace"}
    return (
        {"name": "arrays", "path": path},
        {"name": "natural", "client_ids": f"{path}:clients"},
        {"name": "resnet", "depth": 18},
        {"profiles": profiles, "availability": availability},
    )


def of_mnist(config):
    """The same of MNIST, 300 images a client, and of devices that are drawn."""
    seed = config.get_ref("seed")
    return (
        {"name": "mnist", "data_dir": base.data_dir("mnist_pfl20")},
        {"name": "dirichlet", "num_clients": 200, "alpha": 0.5, "seed": seed},
        {"name": "cnn"},
        {
            "profiles": {"name": "log_normal", "gflops": 1.0},
            "availability": {"name": "diurnal", "hours": 8.0},
        },
    )
