"""FedMargin's table of a set that is small enough to be trained here."""

import json

import numpy as np
import pytest

pytestmark = pytest.mark.ci

ROUNDS, BATCH, TRAINING_IMAGES = 2, 10, 48
CONFIG = f"""
from fedfr_jax.configs import base


def get_config():
    config = base.get_config()
    config.task = "classification"
    config.data = {{"name": "arrays", "path": "IMAGES"}}
    config.partition = {{"name": "iid", "num_clients": 3, "test_fraction": 0.2}}
    config.model = {{"name": "mlp", "hidden_dim": 4}}
    config.federation = {{
        "rounds": 9,
        "cohort_size": 2,
        "local_epochs": 2,
        "batch_size": {BATCH},
        "flip_probability": 0.0,
        "evaluate_every": 1,
        "checkpoint_every": 0,
    }}
    config.methods = {{"fedavg": {{"learning_rate": 0.05}}}}
    return config.lock()
"""


def write_set(folder):
    """The config of 60 images, 20 each of three classes that differ in brightness."""
    rng, labels = np.random.default_rng(0), np.arange(60) % 3
    images = rng.integers(0, 100, (60, 4, 4, 1)) + 70 * labels.reshape(-1, 1, 1, 1)
    np.savez(folder / "images.npz", images=images.astype(np.uint8), labels=labels)
    config = folder / "config.py"
    config.write_text(CONFIG.replace("IMAGES", str(folder / "images.npz")))
    return config


def play(runs, folder):
    """The runs of the set in `folder`, as results.json has them."""
    given = f"--sets=small --seeds=0 --stragglers=0,0.5 --rounds={ROUNDS}"
    given = [*given.split(), f"--workdir={folder}", f"--results={folder}"]
    runs.main(given)
    return json.loads((folder / "results.json").read_text())["small"]


@pytest.fixture(scope="module")
def folder(fedmargin_run, patch, tmp_path_factory):
    """Of a set that nobody has played yet."""
    folder = tmp_path_factory.mktemp("fedmargin")
    config = fedmargin_run.Set(str(write_set(folder)))
    patch.setitem(fedmargin_run.SETS, "small", config)
    return folder


@pytest.fixture(scope="module")
def found(fedmargin_run, folder):
    """{"central": its run, share of stragglers: FedAvg's run}."""
    runs = play(fedmargin_run, folder)
    return {run.get("stragglers", "central"): run for run in runs}


def config_of(runs, share):
    config = runs.config_of(runs.SETS["small"], ROUNDS)
    return runs.with_federation({**config, "seed": 0}, straggler_fraction=share)


def test_the_central_network_sees_everybodys_images_once_a_round(found, folder):
    assert [*found] == ["central", 0.0, 0.5]
    log = (folder / "small/seed0/central/metrics.jsonl").read_text().splitlines()
    steps = -(-TRAINING_IMAGES // BATCH)
    assert [json.loads(line)["steps"] for line in log] == [steps] * ROUNDS


def test_features_are_judged_in_every_round_unless_somebody_straggles(found):
    assert len(found[0.0]["amm"]) == len(found[0.0]["mmd"]) == ROUNDS
    assert not {"amm", "mmd"} & found[0.5].keys()


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_loss_is_that_of_the_last_network_on_the_training_images(
    fedmargin_run, found, folder, share
):
    experiment = fedmargin_run.built(config_of(fedmargin_run, share))
    place = folder / f"small/seed0/stragglers{share:g}"
    network, log = fedmargin_run.trained(experiment, "fedavg", place)
    table = experiment.task.dataset
    images = np.float32(table.inputs["image"]) / 127.5 - 1
    apply = experiment.stages["fedavg"].trainer.apply_global
    outputs, labels = np.asarray(apply(network, images)), table.targets["label"]
    assert len(labels) == TRAINING_IMAGES
    likelihood = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    loss = -np.log(likelihood[np.arange(TRAINING_IMAGES), labels]).mean()
    assert found[share]["loss"] == pytest.approx(loss, rel=1e-5)
    assert log[-1]["loss"] != pytest.approx(loss, rel=1e-3)  # that of local steps


def test_cross_entropy_is_a_mean_over_images(fedmargin_run):
    logits, labels = np.log([[0.5, 0.5], [0.2, 0.8]]), np.array([0, 1])
    told = fedmargin_run.mean_cross_entropy(logits, labels)
    assert told == pytest.approx(-np.log(0.5 * 0.8) / 2)


def test_a_second_call_trains_nothing(fedmargin_run, found, folder):
    read = lambda: {path: path.read_text() for path in folder.rglob("metrics.jsonl")}
    before = read()
    assert play(fedmargin_run, folder) == [*found.values()]  # seconds and all
    assert len(before) == 3 and read() == before


def test_a_run_of_another_config_is_not_taken_for_this_one(
    fedmargin_run, found, folder
):
    other = config_of(fedmargin_run, 0.0) | {"seed": 1}
    place = folder / "small/seed0/stragglers0"
    with pytest.raises(ValueError, match="fedavg.json must be of this config"):
        fedmargin_run.one_run("small", other, "fedavg", place, None)
