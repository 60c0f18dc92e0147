"""A dry run reads no image, and its numbers are those of hand-made counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from fedfr_jax.build import dry_run as dry_run_config
from fedfr_jax.data.partition import ms1m
from fedfr_jax.mesh import make_mesh
from fedfr_jax.runs import dry_run
from fedfr_jax.runs.experiment import Federation
from fedfr_jax.tasks.methods import federated_faces
from fedfr_jax.types import Model

SIDE, DIM, BATCH = 8, 16, 8
SPLIT = {
    "num_clients": 2,
    "ids_per_client": 3,
    "num_global_ids": 5,
    "client_images": (10, 20),
    "global_images": (6, 10),
    "num_test_images": 4,
}
FORWARD = 2 * BATCH * SIDE * SIDE * DIM


def apply(variables, x, train):
    del train
    return x.reshape(len(x), -1) @ variables["params"]["kernel"], {}


def init(key):
    kernel = jax.random.normal(key, (SIDE * SIDE, DIM), jnp.float32)
    return {"params": {"kernel": kernel}, "batch_stats": {}}


MODEL = Model(init, apply, (SIDE, SIDE, 1), DIM)


@pytest.fixture(scope="module")
def partition():
    """Two clients of 3 identities x 11 training images, 5 public ones x 8."""
    labels = dry_run.made_up_labels(**SPLIT)
    return ms1m(labels, **SPLIT)


def test_made_up_labels_have_the_counts_of_the_split(partition):
    np.testing.assert_array_equal(np.diff(partition.train_offsets), [33, 33])
    np.testing.assert_array_equal(np.diff(partition.test_offsets), [12, 12])
    assert len(partition.global_examples) == 5 * 8


def test_the_paper_has_about_6500_training_images_per_client():
    partition = ms1m(dry_run.made_up_labels())
    np.testing.assert_array_equal(np.diff(partition.train_offsets), 40 * [6500])
    assert len(partition.global_examples) == 6000 * 70
    assert len(partition.test) == 160_000


def test_fedavg_is_counted_by_its_steps(partition):
    method = federated_faces(
        MODEL, num_classes=3, public=False, contrastive_weight=0.0, branch=None
    )
    federation = Federation(batch_size=BATCH, local_epochs=(2, 1), drop_last=True)
    count = lambda h: dry_run.operations(
        MODEL, method, partition, federation, hard_negatives=h
    )
    flops = count(0)
    assert flops["steps"] == 2 * 2 * (33 // BATCH)
    assert set(flops) == {"steps", "local steps"}
    per_step = flops["local steps"] / flops["steps"]
    # Forward and the kernel's gradient; the images need none.
    assert 2 * FORWARD < per_step < 4 * FORWARD
    assert count(100) == flops  # nobody selects


def test_fedfr_is_counted_with_its_features_and_memory(partition):
    method = federated_faces(MODEL, num_classes=3)
    federation = Federation(batch_size=BATCH, local_epochs=1)
    flops = dry_run.operations(MODEL, method, partition, federation, hard_negatives=15)
    assert flops["steps"] == 2 * (33 + 15) // BATCH
    blocks = 2 * 2 * 48 // BATCH
    np.testing.assert_allclose(
        flops["previous networks' features"], blocks * FORWARD, rtol=0.05
    )
    images = 2 * (66 + 40)
    np.testing.assert_allclose(
        flops["global network's features"], images / BATCH * FORWARD, rtol=0.05
    )
    assert flops["similarities"] == 2 * DIM * 66 * 40
    lowered, row = dry_run.lower_round(
        MODEL, method, partition, federation, make_mesh(2)
    )
    numbers = dry_run.report(lowered, row, partition, flops, lowered.compile())
    assert numbers["GiB"]["temporary"] > 0
    table = (66 + 40) * (SIDE * SIDE + 4) / 2**30
    np.testing.assert_allclose(numbers["GiB"]["images and labels, per device"], table)
    assert "FLOP" in dry_run.format_report(numbers)


def test_a_config_without_its_data_still_runs_dry(capsys):
    config = ConfigDict({"seed": 0, "pretrain": {}, "evaluation": {}})
    config.data = {"name": "recordio", "path": "nowhere/train.rec", "image_size": 16}
    config.partition = {"name": "ms1m", **SPLIT}
    config.model = {
        "name": "sphereface",
        "blocks": (1, 1),
        "widths": (4, 8),
        "embedding_dim": 8,
    }
    config.federation = {"batch_size": 8, "local_epochs": 1}
    fedavg = {"public": False, "contrastive_weight": 0.0, "branch": None}
    config.methods = {"fedavg": fedavg, "everyone": {"kind": "central"}}
    results = dry_run_config(config, compile=False, hard_negatives=5)
    assert set(results) == {"fedavg"}
    assert results["fedavg"]["local steps of round 0"] == 2 * 5
    assert "GiB" in capsys.readouterr().out
