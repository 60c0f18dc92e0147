"""What a plan builds of a config."""

import numpy as np
import pytest
from ml_collections import ConfigDict

from fedfr_jax.central.settings import Training
from fedfr_jax.config.build import build, sections
from fedfr_jax.data.stream import place_examples
from fedfr_jax.runs.stages import build_stage_simulation


def config(path, lanes, **model):
    return {
        "seed": 0,
        "data": {"name": "arrays", "path": str(path)},
        "partition": {
            "num_clients": 2,
            "ids_per_client": 2,
            "num_public_ids": 3,
            "num_unseen_ids": 2,
        },
        "model": {"name": "cnn", "widths": (8, 8), "embedding_dim": 4, **model},
        "pretrain": {"batch_size": 8},
        "federation": {"clients_per_device": lanes},
        "evaluation": {},
        "methods": {
            "fedfr": {},
            "ditto": {"algorithm": "ditto", "momentum": 0.0},
            "central": {"kind": "central"},
        },
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("arrays") / "faces.npz"
    images = np.random.default_rng(0).integers(0, 256, (72, 12, 12, 3), np.uint8)
    np.savez(path, images=images, labels=np.repeat(np.arange(9), 8))
    return path


def test_a_row_may_have_local_epochs_of_its_own(path):
    settings = {**config(path, 1), "task": "faces"}
    settings["methods"] = {"fedfr": {"local_epochs": (5, 2)}, "ditto": {}}
    settings["methods"]["ditto"] = {"algorithm": "ditto", "local_epochs": 7}
    settings["methods"]["fedavg"] = {
        "algorithm": {"name": "fedfr", "use_public_data": False}
    }
    experiment = build(settings)
    epochs = {}
    for name in ("fedfr", "ditto", "fedavg"):
        trainer = experiment.stages[name].trainer
        table = place_examples(experiment.task.dataset, experiment.mesh)
        sim = build_stage_simulation(experiment, trainer, table)
        epochs[name] = [sim.settings.epochs(r) for r in range(4)]
    assert epochs == {
        "fedfr": [5, 2, 2, 2],
        "ditto": [7, 7, 7, 7],
        "fedavg": [10, 8, 6, 4],
    }
    for bad in (2.5, (), -1, "two"):
        settings["methods"] = {"fedfr": {"local_epochs": bad}}
        with pytest.raises(
            ValueError, match="config.methods.fedfr(: |.)local_epochs must"
        ):
            build(settings)


@pytest.mark.parametrize(
    "methods, message",
    [
        ({1: {}}, "config.methods must have string keys, got 1."),
        (
            {"a": {"b": ({"c": {2: 0}},)}},
            r"config.methods.a.b\[0\].c must have string keys, got 2.",
        ),
        ({"a": {"b": [1, {2}]}}, r"config.methods.a.b\[1\] must be .*, got \{2\}."),
        ({"a": {"b": 1j}}, "config.methods.a.b must be .*, got 1j."),
        ({"a": {"b": ...}}, "config.methods.a.b must be .*, got Ellipsis."),
    ],
)
def test_what_no_run_could_keep_of_its_config_is_refused_by_its_place(methods, message):
    for given in ({"methods": methods}, ConfigDict({"methods": methods})):
        with pytest.raises(ValueError, match=f"^{message}$"):
            sections(given)


def test_keys_that_are_no_text_are_refused_by_their_place():
    mixed = ConfigDict({"methods": {"a": {"b": 1, 2: 0}}})
    with pytest.raises(ValueError, match="^config.methods.a must have string keys"):
        sections(mixed)


def test_what_a_library_hands_over_is_no_literal():
    given = {"weights": np.zeros(2), "of": build, "mesh": Training()}
    assert sections({"methods": {"a": given}})["methods"]["a"]["of"] is build
