"""Public identities trained on the whole mesh, as a config says."""

import jax
import numpy as np
import pytest

from fedfr_jax.runs.stages import start_stage
from tests.tasks.faces import given
from tests.tasks.faces.given import experiment_of, linear_model, partition_of, source_of

pytestmark = pytest.mark.ci

PUBLIC = tuple(range(2, 13))
SETTINGS = {
    "epochs": 2,
    "batch_size": 8,
    "learning_rate": 0.01,
    "flip_probability": 0.0,
    "warmup_fraction": 0.0,
}
CUT = {
    "class_parallel": True,
    "class_chunk_size": 2,
    "sharding": (("kernel", "zero3"),),
}


def experiment(grid=(1, 1), **pretrain):
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(15, dtype=np.int32), 6)
    images = random.integers(0, 256, (len(labels), 4, 4, 3), np.uint8)
    is_test = np.arange(len(labels)) % 6 == 5
    partition = partition_of(
        labels, is_test, [[0], [1]], public=PUBLIC, unseen=(13, 14)
    )
    settings = {"pretrain": {**SETTINGS, **pretrain}, "methods": {"fedfr": {}}}
    source = source_of(images, labels)
    return experiment_of(
        settings, linear_model((4, 4, 3), 6, 1.0), source, partition, grid
    )


def pretrained(folder, grid=(1, 1), **pretrain):
    """The variables at the end of pretraining on devices [clients, model]."""
    return given.pretrain(experiment(grid, **pretrain), folder)


def close(actual, expected):
    one = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(one, actual, expected)


def test_the_whole_mesh_trains_what_one_device_trains(tmp_path):
    plain = pretrained(tmp_path / "plain")
    cut = pretrained(tmp_path / "cut", (2, 2), gradient_accumulation_steps=2, **CUT)
    assert cut["params"]["phi"].shape == (len(PUBLIC), 6)
    close(cut, plain)


def test_a_federated_stage_starts_from_classes_that_were_cut(tmp_path):
    whole = experiment((2, 1), **CUT)
    cut = pretrained(tmp_path, (2, 1), epochs=1, **CUT)
    begun = start_stage(whole, whole.stages["fedfr"].trainer, cut, tmp_path / "fedfr")
    begun.checkpointer.close()
    tables = [x for x in jax.tree.leaves(begun.server) if x.shape == (len(PUBLIC), 6)]
    np.testing.assert_array_equal(tables[0], cut["params"]["phi"])


@pytest.mark.parametrize(
    "name, options",
    [
        ("curricularface", {}),
        ("magface", {}),
        ("adaface", {}),
        ("elasticface", {"std": 0.0}),  # each device draws margins of its own
    ],
)
def test_running_numbers_and_lengths_of_features_are_those_of_the_whole_batch(
    tmp_path, name, options
):
    settings = {"loss": {"name": name, "scale": 8.0, **(options or {})}}
    plain = pretrained(tmp_path / "plain", **settings)
    cut = pretrained(tmp_path / "cut", (4, 1), **CUT, **settings)
    close(cut, plain)


def test_classes_that_look_like_noise_are_left_out_whole_and_cut(tmp_path):
    settings = {"interclass_filtering_threshold": 0.2, "loss": {"scale": 8.0}}
    plain = pretrained(tmp_path / "plain", **settings)
    close(pretrained(tmp_path / "cut", (4, 1), **CUT, **settings), plain)
    of_all = pretrained(tmp_path / "of all", loss={"scale": 8.0})
    change = plain["params"]["phi"] - of_all["params"]["phi"]
    assert np.abs(change).max() > 1e-3
