"""What a config says of batches and weights is what clients and server do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.configs import base
from fedfr_jax.federated.local import step_decay
from fedfr_jax.federated.settings import Federation
from fedfr_jax.runs.costs import communication
from fedfr_jax.runs.stages import start_stage
from fedfr_jax.tasks.faces import methods
from fedfr_jax.types import Model
from tests.tasks.faces import given
from tests.tasks.faces.given import experiment_of, partition_of, source_of

LEFT, RIGHT = 255, 0  # of images one pixel high and two wide
FLIP = 0.25  # no default
RATE = {"learning_rate": 0.1, "weight_decay": 0.0}
BACKBONE = {"params": {"kernel": np.eye(2, 3, dtype=np.float32)}, "batch_stats": {}}
START = {
    "params": {"backbone": BACKBONE["params"], "phi": np.ones((2, 3), np.float32)},
    "batch_stats": {},
}


def watched(seen):
    """A linear network that notes the left pixels that it is trained on."""

    def apply(variables, x, train, key=None):
        if train:
            jax.debug.callback(lambda left: seen.append(left), x[:, 0, 0, 0])
        flat = x.reshape(len(x), -1)
        return flat @ variables["params"]["kernel"], variables["batch_stats"]

    return Model(lambda key: jax.tree.map(jnp.asarray, BACKBONE), apply, (1, 2, 1), 3)


def built(seen, **settings):
    """Clients of 16 and 48 images, two public people and as many unseen ones."""
    people = np.array([16, 24, 24, 32, 32, 8, 8])
    labels = np.repeat(np.arange(7, dtype=np.int32), people)
    labels, is_test = np.append(labels, [0, 1, 2]), np.arange(147) >= 144
    images = np.zeros((147, 1, 2, 1), np.uint8)
    images[:, 0, 0], images[:, 0, 1] = LEFT, RIGHT
    who = {"public": (3, 4), "unseen": (5, 6)}
    partition = partition_of(labels, is_test, [[0], [1, 2]], **who)
    settings = {"methods": {"fedavg": {**base.FEDAVG, **RATE}}, **settings}
    return experiment_of(settings, watched(seen), source_of(images, labels), partition)


def played(experiment, folder):
    """(server, rows of the clients) after a round from START."""
    _, _, server, rows = given.first_round(experiment, "fedavg", START, folder)
    jax.effects_barrier()
    return server, rows


def pretrained(experiment, folder):
    given.pretrain(experiment, folder)
    jax.effects_barrier()


@pytest.mark.parametrize(
    "section, train", [("federation", played), ("pretrain", pretrained)]
)
def test_images_are_mirrored_as_often_as_the_config_says(tmp_path, section, train):
    epochs = {"federation": "local_epochs", "pretrain": "epochs"}[section]
    seen = []
    settings = {"batch_size": 16, "flip_probability": FLIP, epochs: 4}
    train(built(seen, **{section: settings}), tmp_path)
    left = np.concatenate(seen)
    assert len(left) == 4 * 64 and set(left) == {-1.0, 1.0}
    np.testing.assert_allclose((left < 0).mean(), FLIP, atol=0.08)  # three deviations


def test_fedavg_weighs_clients_by_their_images(tmp_path):
    federation = {"batch_size": 16, "local_epochs": 1}
    server, rows = played(built([], federation=federation), tmp_path)
    assert given.own(rows)["head"].shape == (2, 2, 3)  # of the client with most classes
    small, large = given.previous(rows)["params"]["kernel"]
    expected = (16 * small + 48 * large) / 64
    assert np.abs(small - large).max() > 1e-3
    np.testing.assert_allclose(
        given.backbone(server)["params"]["kernel"], expected, rtol=1e-6
    )


def test_a_round_sends_the_backbone_and_with_public_images_their_classes(tmp_path):
    """Hard negatives are of public images, which all clients hold."""
    methods = {"fedavg": {**base.FEDAVG, **RATE}, "fedfr": {**base.FEDFR, **RATE}}
    experiment = built([], methods=methods)
    backbone, classes, sent = 2 * 3 * 4, 2 * 3 * 4, {}
    for name in methods:
        trainer = experiment.stages[name].trainer
        begun = start_stage(experiment, trainer, START, tmp_path / name)
        begun.checkpointer.close()
        found = communication(begun, 1)
        sent[name] = [1e6 * found[way] for way in ("upload_mb", "download_mb")]
    np.testing.assert_allclose(sent["fedavg"], [backbone, backbone])
    np.testing.assert_allclose(sent["fedfr"], [backbone + classes] * 2)


def test_the_rate_drops_where_the_released_code_drops_it():
    """Round 0: eight epochs, then two at a tenth; 6 + 2, 4 + 2, 3 + 1, 3 + 1, ..."""
    rate = step_decay(1.0, every=methods.DEFAULTS["decay_epochs"])
    epochs = Federation().local_epochs
    found = [
        [float(rate(jnp.int32(r), jnp.int32(e))) for e in range(epochs[min(r, 3)])]
        for r in range(5)
    ]
    parts = [(8, 2), (6, 2), (4, 2), (3, 1), (3, 1)]
    for rates, (first, last) in zip(found, parts, strict=True):
        np.testing.assert_allclose(rates, [1.0] * first + [0.1] * last, rtol=1e-6)
