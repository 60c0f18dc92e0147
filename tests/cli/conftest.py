"""A config of a tiny run."""

import pathlib

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
CONFIG = '''"""A tiny run on arrays."""

from configs import base


def get_config():
    config = base.get_config()
    config.data = {"name": "arrays", "path": "PATH"}
    config.partition = {
        "num_clients": 3,
        "ids_per_client": (2, 3, 2),
        "num_public_ids": 6,
        "num_unseen_ids": 6,
    }
    config.model = {
        "name": "sphereface",
        "blocks": (0, 0),
        "widths": (4, 8),
        "embedding_dim": 8,
    }
    config.pretrain = {"epochs": 3, "batch_size": 8, "learning_rate": 0.05}
    config.federation = {"rounds": 3, "local_epochs": 2, "batch_size": 8}
    config.evaluation = {"batch_size": 8, "fars": (0.1,), "fpirs": (0.5,)}
    return config.lock()
'''


SMALL = '''"""A small classifier."""

from fedfr_jax.configs import base


def get_config():
    config = base.get_config()
    config.task = "classification"
    for name, section in SECTIONS.items():
        config[name] = section
    return config.lock()
'''


def write_config(folder, federation=(), **sections):
    """Write the config of a logistic regression of five classes of noise: its path."""
    rng = np.random.default_rng(0)
    centers = rng.uniform(60, 190, size=(5, 1, 4, 4, 1))
    images = centers + rng.normal(scale=40, size=(5, 12, 4, 4, 1))
    images = images.clip(0, 255).astype(np.uint8).reshape(-1, 4, 4, 1)
    np.savez(folder / "set.npz", images=images, labels=np.repeat(np.arange(5), 12))
    rounds = {"rounds": 2, "local_epochs": 1, "batch_size": 8, "evaluate_every": 1}
    usual = {
        "data": {"name": "arrays", "path": str(folder / "set.npz")},
        "partition": {"name": "iid", "num_clients": 3, "seed": 0},
        "model": {"name": "logistic"},
        "federation": {**rounds, "flip_probability": 0.0, **dict(federation)},
        "methods": {"fedavg": {"learning_rate": 0.05}},
    }
    text = SMALL.replace("SECTIONS", repr({**usual, **sections}))
    (folder / "tiny.py").write_text(text)
    return folder / "tiny.py"


def write_face_config(root):
    """Write a config of 19 identities x 8 noisy 12x12 images, in a configs/ folder."""
    rng = np.random.default_rng(0)
    centers = rng.uniform(60, 190, size=(19, 1, 12, 12, 1))
    images = centers + rng.normal(scale=30, size=(19, 8, 12, 12, 1))
    labels = np.repeat(np.arange(19), 8)
    path = root / "faces.npz"
    images = images.clip(0, 255).astype(np.uint8).reshape(-1, 12, 12, 1)
    np.savez(path, images=images, labels=labels)
    folder = root / "configs"
    folder.mkdir()
    (folder / "base.py").write_text((ROOT / "configs" / "base.py").read_text())
    (folder / "tiny.py").write_text(CONFIG.replace("PATH", str(path)))
    return folder / "tiny.py"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A config of a tiny run."""
    return write_face_config(tmp_path_factory.mktemp("config"))
