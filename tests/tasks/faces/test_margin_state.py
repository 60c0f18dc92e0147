"""What margin losses keep and learn, in central and in federated training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.configs import base
from fedfr_jax.federated.parameter_packing import on_unpacked, pack_networks, unpack
from fedfr_jax.losses import LOSSES
from fedfr_jax.parts import Part
from fedfr_jax.tasks.faces.loss import (
    NUMBERS,
    Branch,
    face_loss,
    on_variables,
    with_margin_state,
    with_start,
)
from fedfr_jax.types import Model
from tests.tasks.faces import given
from tests.tasks.faces.given import experiment_of, partition_of, source_of

pytestmark = pytest.mark.ci

RATE = {"learning_rate": 1e-3, "weight_decay": 0.0}
CURRICULAR = {"loss": {"name": "curricularface", "ema_rate": 1.0}}


def linear_model():
    """One linear layer that knows nothing of margins, and would fail on their numbers.

    It asks for its statistics by name, all of them.
    """

    def init(key):
        kernel = jax.random.normal(key, (2, 3))
        return {"params": {"kernel": kernel}, "batch_stats": {"seen": jnp.zeros(())}}

    def apply(variables, x, train, key=None):
        assert variables["batch_stats"].keys() == {"seen"}
        seen = variables["batch_stats"]["seen"] + float(train)
        flat = x.reshape(len(x), -1)
        return flat @ variables["params"]["kernel"], {"seen": seen}

    return Model(init, apply, (1, 2, 1), 3)


def built(methods, **settings):
    """Clients of 8 and 24 images, two public people and as many unseen ones."""
    people = np.array([8, 12, 12, 8, 8, 4, 4])
    labels = np.repeat(np.arange(7, dtype=np.int32), people)
    labels, is_test = np.append(labels, [0, 1, 2]), np.arange(59) >= 56
    images = np.random.default_rng(0).integers(0, 256, (59, 1, 2, 1), np.uint8)
    partition = partition_of(
        labels, is_test, [[0], [1, 2]], public=(3, 4), unseen=(5, 6)
    )
    settings = {
        "methods": {name: given.nested(row) for name, row in methods.items()},
        "federation": {"batch_size": 8, "local_epochs": 1},
        "pretrain": {"batch_size": 16, "epochs": 1, **settings},
    }
    return experiment_of(settings, linear_model(), source_of(images, labels), partition)


def played(experiment, variables, folder, row):
    """(trainer, server, rows) after a round."""
    trainer, _, server, rows = given.first_round(experiment, row, variables, folder)
    return trainer, server, rows


def test_numbers_are_averaged_over_clients_and_left_out_of_what_is_judged(tmp_path):
    row = {**base.FEDAVG, **RATE, **CURRICULAR}
    experiment = built({"fedavg": row}, loss="adaface")
    central = experiment.stages["pretrained"].trainer
    variables = given.pretrain(experiment, tmp_path / "a")
    kept = variables["batch_stats"][NUMBERS]
    start = LOSSES["adaface"]().state
    assert kept.keys() == start.keys()
    assert all(kept[name] != start[name] for name in start)
    assert central.global_model(variables)["batch_stats"].keys() == {"seen"}

    trainer, server, rows = played(experiment, variables, tmp_path / "b", "fedavg")
    # One with as many steps as 8 images have, one as 24; each ends with a batch's mean.
    small, large = given.previous(rows)["batch_stats"][NUMBERS]["t"]
    assert 0 < abs(small) <= 1 and 0 < abs(large) <= 1 and small != large
    found = given.backbone(server)["batch_stats"][NUMBERS]
    np.testing.assert_allclose(found["t"], (8 * small + 24 * large) / 32, rtol=1e-5)
    deployed = trainer.global_model(server)
    assert deployed["batch_stats"].keys() == {"seen"}
    assert deployed["batch_stats"]["seen"] > 1


def found_in(tree, name):
    """Leaves whose path has the name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [x for path, x in leaves if name in jax.tree_util.keystr(path)]


@pytest.mark.parametrize("statistics", ["average", "local"])
def test_any_algorithm_carries_numbers_and_keeps_what_is_learned(tmp_path, statistics):
    classical = {"algorithm": "fedprox", "mu": 0.1, "batch_stats": statistics, **RATE}
    experiment = built(
        {"t": {**classical, **CURRICULAR}, "b": {**classical, "loss": "uniface"}}
    )
    start = {
        "params": {"backbone": {"kernel": np.eye(2, 3, dtype=np.float32)}, "phi": None},
        "batch_stats": {"seen": np.float32(0)},
    }
    _, server, rows = played(experiment, start, tmp_path / "t", "t")
    if statistics == "average":
        assert found_in(rows, "'t'") == [] and found_in(server, "'t'")[0] != 0
    else:
        (own,) = found_in(rows, "'t'")
        assert own[0] != own[1] and found_in(server, "'t'") == [0]

    _, server, rows = played(experiment, start, tmp_path / "b", "b")
    (bias,), first = found_in(rows, "bias"), LOSSES["uniface"]().params(2)["bias"]
    assert bias.shape == (2,) and (bias != first).all() and bias[0] != bias[1]
    assert found_in(server, "bias") == [first]  # what a new client starts from


def test_packed_networks_keep_the_same_numbers_and_draw_with_the_steps_key():
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    many = lambda *shape: {f"leaf{i}": draw(*shape) for i in range(40)}

    def apply(variables, x, train, key=None):
        params, stats = variables["params"], variables["batch_stats"]
        assert params.keys() == stats.keys()
        noise = jax.random.normal(key, x.shape)
        return x * sum(params.values())[None] + noise, stats

    model = with_margin_state(Model(None, apply, (5,), 5))
    backbone = {"params": many(5), "batch_stats": many()}
    adaface = Part(LOSSES["adaface"], {"scale": 30.0, "margin": 0.4})
    backbone = with_start(backbone, adaface())
    converter = {"kernel": draw(5, 5), "bias": draw(5)}
    branch = {"converter": converter, "weights": draw(4, 5), "bias": jnp.float32(3)}
    labels, number = jnp.int32([0, 1, 2, 3, 0, 1]), jnp.arange(6)
    own = {"num_classes": 4, "is_valid": number < 5, "is_added": number < 2}
    head, batch = draw(4, 5), given.batch_of(draw(6, 5), labels, **own)
    loss = face_loss(
        on_variables(on_unpacked(model)), loss=adaface, branch=Branch("uniface")
    )

    @jax.jit
    def of(backbone, key):
        params = {"phi": head, "head": head, "branch": branch}
        variables = {**backbone, "params": {**params, "backbone": backbone["params"]}}
        value, (stats, metrics) = loss(variables, batch, key)
        return value, metrics, unpack(stats)

    key, packed = jax.random.key(2), pack_networks(backbone)
    assert jax.tree.structure(packed) != jax.tree.structure(backbone)
    plain = of(backbone, key)
    same = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    jax.tree.map(same, plain, of(packed, key))
    moved = plain[2][NUMBERS]
    assert 0 < moved["mean"] < 20 and 0 < moved["deviation"] < 100
    assert of(backbone, jax.random.key(3))[0] != plain[0]
