"""Modules of initial weights that are taken, begin anew, or do not fit."""

import tempfile

import jax
import numpy as np
import pytest

from fedfr_jax.models import MODELS
from fedfr_jax.models.saved_model import named_arrays
from fedfr_jax.models.weights import write_weights
from fedfr_jax.tasks.model import StartConfig, initialized
from fedfr_jax.tasks.trainers import Facts

SHAPE = (16, 16, 3)
RESNET = {"depth": 18, "blocks": [1, 1], "widths": [4, 6], "stem": "cifar"}


def network(seed, name="resnet", classes=5, **settings):
    model = MODELS[name](SHAPE, num_classes=classes, **RESNET | settings)
    return model.init(jax.random.key(seed))


def facts_of(variables):
    facts = Facts(**dict.fromkeys(Facts._fields))
    return facts._replace(initial=lambda: variables)


def started(variables, init):
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/init.safetensors"
        write_weights(path, named_arrays(init))
        return initialized(facts_of(variables), StartConfig(path)).initial()


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_last_layer_for_other_classes_begins_anew(capsys):
    before, given = network(0), network(1, classes=7)
    found = started(before, given)
    same(found["params"]["fc"], before["params"]["fc"])
    for part in ("stem", "stage1", "stage2"):
        same(found["params"][part], given["params"][part])
        same(found["batch_stats"][part], given["batch_stats"][part])
    says = "Initial weights of stage1, stage2, stem; new are fc."
    assert says in capsys.readouterr().out
    same(started(before, network(2)), network(2))
    facts = facts_of(before)
    assert initialized(facts, StartConfig()) is facts


def test_a_segmenters_encoder_begins_with_a_resnet():
    encoder = {"name": "resnet", **RESNET}
    model = MODELS["segmenter"](SHAPE, num_classes=3, encoder=encoder, width=4)
    before, given = model.init(jax.random.key(0)), network(1)
    found = started(before, given)
    same(found["params"]["stage2"], given["params"]["stage2"])
    same(found["params"]["classifier"], before["params"]["classifier"])


def test_weights_of_another_network_name_the_leaf():
    with pytest.raises(ValueError, match=r"pretrain.init: .*stage1/block2.*got \(4,"):
        started(network(0), network(1, blocks=[2, 1]))
    with pytest.raises(ValueError, match=r"stage1/block2/.* must be \(4,.* got absent"):
        started(network(0, blocks=[2, 1]), network(1))
    with pytest.raises(ValueError, match=r"must fit .*stage1/.* got \("):
        started(network(0), network(1, widths=[8, 12]))
    other = MODELS["mlp"](SHAPE, hidden_dim=4).init(jax.random.key(0))
    with pytest.raises(ValueError, match="must have modules of the model, .*'stem'"):
        started(network(0), other)
