"""The key `adapter` of a method."""

import jax
import numpy as np
import pytest
import safetensors.numpy

import fedfr_jax as ff
from fedfr_jax import trees
from fedfr_jax.config.build import build
from fedfr_jax.models.weights import read_weights
from fedfr_jax.runs.experiment import run_experiment
from tests.tasks import tiny

LORA = {"name": "lora", "rank": 2, "targets": "fc"}
PRIVATE = {"clip_norm": 0.5, "delta": 1e-2, "noise_multiplier": 1.0}


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
    alone = safetensors.numpy.load_file(
        tmp_path / "x/adapter/adapter_model.safetensors"
    )
    down, up = (alone[f"base_model.model.fc.lora_{x}.weight"] for x in "AB")
    np.testing.assert_allclose((up @ down).T * 16 / 2, change, atol=1e-5)
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
    ("adapter", "words"),
    [
        ({**LORA, "rank": 5}, "methods.x: adapter.rank must be at most 4"),
        ({**LORA, "targets": "x"}, "adapter.targets must match a layer"),
        ({"name": "prompt"}, "needs a network with tokens"),
        ({**LORA, "name": "lor"}, "did you mean lora"),
        ({**LORA, "ranks": [1, 3]}, "adapter: ranks must be at most rank, 2, got 3"),
        ({**LORA, "ranks": [[0.5, 1]]}, "methods.x: ranks must have shares with sum 1"),
        ({**LORA, "ranks": [1, 2, 2]}, "with_ranks.*3"),
        ({**LORA, "ranks": [1, [1.0, 2]]}, "ranks must be a number for each client"),
        ({**LORA, "ranks": [1, 2], "train_a": False}, "lora with train_a=True"),
        ({"name": "bias", "average": "products"}, "need the adapter lora"),
        (
            {**LORA, "ranks": [1, 2], "average": "products"},
            "average must be factors with ranks",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(adapter, words):
    with pytest.raises(ValueError, match=words) as error:
        build(tiny.config("classification", {"adapter": adapter}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"widths": [0.5, 1], "frozen": "fc"}, "widths cannot be set with frozen"),
        ({"widths": [0.5, 1, 1]}, "with_widths.*3"),
        ({"widths": [1.5, 1]}, r"widths must be in \(0, 1\]"),
        ({"widths": [0.5, 1], "privacy": PRIVATE}, "privacy cannot be set with widths"),
        (
            {"adapter": {**LORA, "ranks": [1, 2]}, "privacy": PRIVATE},
            "privacy cannot be set with widths or adapter.ranks",
        ),
        ({"features": "host", "features_gib": 1.0}, "features_gib needs features="),
        ({"widths": [0.5, 1], "aggregation": "median"}, "cannot replace the mean"),
        ({"frozen": {"blocks": 1}, "personal": {"blocks": 1}}, "personal must match"),
        ({"adapter": LORA, "personal": "fc/kernel"}, "leaves that are not frozen"),
    ],
)
def test_keys_that_exclude_each_other_are_one_line(method, words):
    with pytest.raises(ValueError, match=words) as error:
        build(tiny.config("classification", method))
    assert "\n" not in str(error.value)


@pytest.mark.ci
@pytest.mark.parametrize(
    "method",
    [
        {"adapter": {**LORA, "ranks": [[0.5, 1], [0.5, 2]]}},
        {"adapter": {**LORA, "average": "products"}},
        {"widths": [0.5, 1.0]},
    ],
)
def test_a_config_trains_ranks_products_and_widths(method, tmp_path):
    algorithm = build(tiny.config("classification", method))
    run_experiment(algorithm, tmp_path / "parts")
    plain = {**method, "adapter": LORA} if "adapter" in method else {}
    run_experiment(build(tiny.config("classification", plain)), tmp_path / "plain")
    found, whole = (
        read_weights(tmp_path / x / "x" / "weights.safetensors").arrays
        for x in ("parts", "plain")
    )
    assert found.keys() == whole.keys()
    change = np.abs(found["params/fc/kernel"] - whole["params/fc/kernel"]).max()
    assert 1e-6 < change < 1
