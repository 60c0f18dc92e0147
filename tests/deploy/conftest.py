"""A run of a few seconds, whose networks are opened, exported and used."""

import json

import jax
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax.config.build import build
from fedfr_jax.runs.experiment import run_stages
from fedfr_jax.runs.workdir import claim_on_all_processes
from fedfr_jax.schema import with_tuples

MODEL = {"name": "iresnet", "blocks": [1], "widths": [4], "embedding_dim": 8}


def settings(path, **changes):
    """A config of 13 people on two clients."""
    return {
        "seed": 0,
        "data": {"name": "arrays", "path": str(path)},
        "partition": {
            "num_clients": 2,
            "ids_per_client": 2,
            "num_public_ids": 4,
            "num_unseen_ids": 5,
        },
        "model": MODEL,
        "pretrain": {"epochs": 1, "batch_size": 16, "learning_rate": 0.05},
        "federation": {"rounds": 1, "local_epochs": 1, "batch_size": 8},
        "evaluation": {"batch_size": 8, "fars": [0.1], "fpirs": [0.5]},
        "methods": {
            "fedfr": {
                "algorithm": {
                    "name": "fedfr",
                    "use_public_data": False,
                    "contrastive_weight": 0.0,
                    "weighting": "num_examples",
                },
                "frozen": "backbone/(stem|stage1)/",
            },
        },
        **changes,
    }


@pytest.fixture(scope="session")
def faces(tmp_path_factory):
    """A .npz of 13 people x 6 noisy images of 12 x 12."""
    rng = np.random.default_rng(0)
    centers = rng.uniform(60, 190, size=(13, 1, 12, 12, 3))
    images = centers + rng.normal(scale=30, size=(13, 6, 12, 12, 3))
    path = tmp_path_factory.mktemp("faces") / "faces.npz"
    images = images.clip(0, 255).astype(np.uint8).reshape(-1, 12, 12, 3)
    np.savez(path, images=images, labels=np.repeat(np.arange(13), 6))
    return path


def play(config, folder):
    """Train and judge what a config says in a folder; returns the experiment."""
    text = json.dumps(config)
    experiment = build(with_tuples(config))
    with claim_on_all_processes(folder, text, experiment.stages):
        with jax.numpy_dtype_promotion("standard"):  # for optax's schedules
            run_stages(experiment, folder)
    return experiment


@pytest.fixture(scope="session")
def run(faces, tmp_path_factory):
    """The run's work folder."""
    folder = tmp_path_factory.mktemp("run")
    PLAYED[folder] = play(settings(faces), folder)
    return folder


PLAYED = {}  # experiments by their folders, whose programs are compiled


@pytest.fixture(scope="session")
def experiment(run):
    """What was run."""
    return PLAYED[run]


@pytest.fixture(scope="session")
def server(run):
    """The opened network of the run's last stage."""
    return ff.load_model(run)


@pytest.fixture(scope="session")
def pretrained(run):
    """That of its first."""
    return ff.load_model(run, method="pretrained")


@pytest.fixture(scope="session")
def own(run):
    """That of a client, which has layers of its own."""
    return ff.load_model(run, client=1)
