"""FedReID at the size of arXiv:2008.11560: nine data sets, ResNet-50, 300 rounds.

fedfr train --config=configs/fedreid/paper.py --workdir=runs/fedreid_paper

Not measured: the processed sets are given out on request only. Each set is its
archive, unpacked; of the five small ones a seed samples the people to test, as many as
the paper's (see data/sources/reid.py), or give a list with `reid_csv`.
CUHK02, shared without labels, is a folder with a split.csv, and resnet50-0676ba61.pth
is torchvision's file.
Expected of the ResNet and its optimizer as released: 0.005 below the neck, 0.05 in
neck and classifier, no decay within a round, statistics of one client, drawn anew in
every round. The row merged has the same two rates, with warm-up and a cosine.
Leave one domain out: --config.partition.held_out_domains=market tests on Market-1501,
which nobody then trains on; {"name": "camera_statistics"} before the normalization in
federation.augment gives images the colors of other clients' cameras.
"""

from fedfr_jax.configs import base

SMALL = {"prid2011": 100, "cuhk01": 486, "viper": 316, "3dpes": 100, "ilids": 60}
PRID_SHOTS = {"train_shots": "multi_shot"}  # 3,744 training images are no single shots
IMAGENET = {  # in bytes
    "name": "normalize",
    "mean": (123.675, 116.28, 103.53),
    "std": (58.395, 57.12, 57.375),
}


def sets():
    """The nine sets as parts of one source."""
    folder = lambda name: base.data_dir(f"reid/{name}")
    of = lambda name: {"name": name, "data_dir": folder(name)}
    small = {name: {**of(name), "test_identities": n} for name, n in SMALL.items()}
    small["prid2011"] |= PRID_SHOTS
    return {
        "msmt17": of("msmt17"),
        "duke": {"name": "market1501", "path": folder("dukemtmc_reid")},
        "market": {"name": "market1501", "path": folder("market1501")},
        "cuhk03": of("cuhk03_np"),
        **small,
    }


def get_config():
    """One client for each set, all of them in every round."""
    config = base.get_config()
    config.task = "reid"
    config.data = {"name": "concat", "sources": sets()}
    cuhk02 = {"name": "reid_csv", "path": base.data_dir("reid/cuhk02/split.csv")}
    config.partition = {"name": "by_dataset", "public": {"source": cuhk02}}
    weights = base.data_dir("reid/resnet50-0676ba61.pth")
    config.model = {"name": "reid", "depth": 50, "weights": weights}
    augment = ({"name": "pad_and_crop", "padding": 10}, IMAGENET)
    config.federation = {
        "rounds": 300,
        "local_epochs": 1,
        "batch_size": 32,
        "drop_last": True,
        "augment": augment,
        "evaluate_every": 10,
    }
    rates = {"learning_rate": 0.05, "learning_rate_multipliers": {"^(stem|stage)": 0.1}}
    sgd = {
        **rates,
        "optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True},
        "weight_decay": 5e-4,
    }
    config.evaluation = {
        "average_precision": "official",
        "average_over": "all",
        "local_training": sgd,
    }
    local = {**sgd, "batch_stats": "random_client"}
    central = {"batch_size": 32, **rates, "augment": augment}
    config.methods = base.fedreid_rows(local, every=10, epochs=300, **central)
    return config.lock()
