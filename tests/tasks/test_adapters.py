"""The key `adapter` of a method."""

import jax
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax import trees
from fedfr_jax.config.build import build
from fedfr_jax.models.weights import read_weights
from fedfr_jax.runs.experiment import run_experiment
from tests.tasks import tiny

LORA = {"name": "lora", "rank": 2, "targets": "fc"}


@pytest.mark.ci
def test_a_run_saves_the_plain_network_with_what_it_learned(tmp_path):
    experiment = build(tiny.config("classification", {"adapter": LORA}))
    start = trees.by_name(
        build(tiny.config("classification")).stages["x"].trainer.init_variables(None)
    )
    run_experiment(experiment, tmp_path)
    arrays = read_weights(tmp_path / "x" / "weights.safetensors").arrays
    assert arrays.keys() == start.keys()
    moved = {k for k, x in arrays.items() if np.any(x != start[k])}
    assert moved == {
        f"params/{x}" for x in ("fc/kernel", "classifier/kernel", "classifier/bias")
    }
    change = arrays["params/fc/kernel"] - start["params/fc/kernel"]
    assert np.linalg.matrix_rank(change, tol=1e-5) == 2
    images = np.zeros((2, *tiny.SHAPE), np.uint8)
    assert np.isfinite(ff.load_model(tmp_path / "x").embed(images)).all()


@pytest.mark.ci
def test_clients_with_personal_adapters_are_evaluated_and_bottlenecks_too(tmp_path):
    method = {"adapter": LORA, "personal": "lora_[ab]$"}
    run_experiment(build(tiny.config("classification", method)), tmp_path / "personal")
    method = {"adapter": {"name": "bottleneck", "rank": 2, "head": "classifier"}}
    run_experiment(build(tiny.config("classification", method)), tmp_path / "small")
    arrays = read_weights(tmp_path / "small" / "x" / "weights.safetensors").arrays
    assert np.any(arrays["params/fc/adapter_up"])


def test_frozen_is_added_to_what_an_adapter_freezes():
    method = {"adapter": LORA, "frozen": "lora_a$"}
    trainer = build(tiny.config("classification", method)).stages["x"].trainer
    moving = trainer.init_variables(None)
    names = {*trees.by_name(moving["params"])}
    assert names == {"fc/lora_b", "classifier/kernel", "classifier/bias"}
    whole = trainer.global_model(trainer.algorithm.init(moving))
    assert {*trees.by_name(whole["params"]["fc"])} == {"kernel", "bias"}
    again = build(tiny.config("classification", method)).stages["x"].trainer
    jax.tree.map(np.testing.assert_array_equal, moving, again.init_variables(None))


@pytest.mark.parametrize(
    ("task", "adapter", "words"),
    [
        (
            "classification",
            {**LORA, "rank": 5},
            "methods.x: adapter.rank must be at most 4",
        ),
        (
            "classification",
            {**LORA, "targets": "x"},
            "adapter.targets must match a layer",
        ),
        ("classification", {"name": "prompt"}, "needs a network with tokens"),
        ("classification", {**LORA, "name": "lor"}, "did you mean lora"),
        ("classification", {**LORA, "ranks": 2}, "ranks"),
        ("faces", LORA, "adapter must be None in the tasks faces and reid"),
    ],
)
def test_what_does_not_fit_is_one_line(task, adapter, words):
    with pytest.raises(ValueError, match=words):
        build(tiny.config(task, {"adapter": adapter}))
