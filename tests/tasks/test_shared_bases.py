"""Faces and re-identification on a frozen network, and with adapters."""

import re

import chex
import jax
import numpy as np
import pytest

import fedfr_jax as ff
from fedfr_jax import trees
from fedfr_jax.config.build import build
from fedfr_jax.models.weights import read_weights
from fedfr_jax.runs.experiment import run_experiment
from fedfr_jax.runs.stages import start_stage
from tests.federated import toys
from tests.tasks import tiny

pytestmark = pytest.mark.ci

TASKS = toys.others_are_slow({("faces",)}, ("faces", "reid"))
CONV = r"/conv\d*/kernel$"  # not the norms, which masks leave in training
BASE = {"faces": "backbone/(stem|stage)", "reid": "params/(stem|stage)"}
RESNET = {"name": "resnet", "stem": "cifar", **tiny.SMALL}
LORA = {"name": "lora", "rank": 1, "targets": "conv"}
FEDFR = {"algorithm": {"name": "fedfr", "hard_negative_threshold": -1.0}}


def trained(task, method, folder, **federation):
    """Weights that a run saves."""
    method = {**(FEDFR if task == "faces" else {}), **method}
    federation = {"rounds": 2, **federation}
    experiment = build(tiny.config(task, method, federation=federation))
    with jax.numpy_dtype_promotion("standard"):  # which optax's schedules need
        run_experiment(experiment, folder)
    return read_weights(folder / "x" / "weights.safetensors").arrays


@pytest.mark.parametrize("task", TASKS)
def test_training_is_that_of_a_mask(task, tmp_path):
    masked = {"learning_rate_multipliers": {CONV: 0.0}}
    found = trained(task, {"frozen": CONV}, tmp_path / "frozen")
    expected = trained(task, masked, tmp_path / "masked")
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_features_of_the_base_change_no_number(task, tmp_path):
    mirrored = {"flip_probability": 0.5}
    kept, run = (
        trained(task, {"frozen": BASE[task], "features": x}, tmp_path / x, **mirrored)
        for x in ("host", "off")
    )
    chex.assert_trees_all_close(kept, run, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_a_run_with_an_adapter_saves_plain_networks(task, tmp_path):
    plain = trained(task, {}, tmp_path / "plain", rounds=1)
    arrays = trained(task, {"adapter": LORA}, tmp_path / "run", rounds=1)
    assert arrays.keys() == plain.keys()
    images = np.zeros((2, *tiny.SHAPE), np.uint8)
    assert np.isfinite(ff.load_model(tmp_path / "run" / "x").embed(images)).all()


@pytest.mark.parametrize("task", TASKS)
def test_rows_and_checkpoints_have_no_frozen_leaf(task, tmp_path):
    experiment = build(tiny.config(task, {"adapter": LORA}))
    stage, start = experiment.stages["x"], None
    if stage.init_from_stage:
        start = experiment.stages[stage.init_from_stage].trainer.init(jax.random.key(0))
    state = start_stage(experiment, stage.trainer, start, tmp_path / "x")
    state.checkpointer.close()
    names = " ".join(trees.by_name((state.server, state.store.template)))
    assert "lora_a" in names and "conv/kernel" not in names


@pytest.mark.parametrize("task", ["faces", "classification"])
def test_central_training_moves_the_adapter_and_the_head_alone(task, tmp_path):
    sections = {"model": RESNET} if task == "classification" else {}
    method = {"kind": "central", "epochs": 1, "batch_size": 16, "adapter": LORA}

    def end(rate):
        config = tiny.config(task, {**method, "learning_rate": rate}, **sections)
        with jax.numpy_dtype_promotion("standard"):
            run_experiment(build(config), tmp_path / str(rate))
        folder = tmp_path / str(rate) / "x"
        return read_weights(folder / "weights.safetensors").arrays

    before, after = end(0.0), end(1e-3)
    assert before.keys() == after.keys()
    change = {k: np.asarray(x - before[k]) for k, x in after.items() if k[0] == "p"}
    kernels = [x.reshape(-1, x.shape[-1]) for k, x in change.items() if "conv/k" in k]
    sizes = [np.linalg.svd(x, compute_uv=False) for x in kernels]
    assert sizes and all(0 < x[0] > 100 * x[1] for x in sizes)
    still = [x for k, x in change.items() if re.search("(stem|stage).*(scale|bias)", k)]
    assert still and not any(map(np.any, still))


def test_faces_take_a_prompt(tmp_path):
    vit = {"width": 8, "depth": 2, "num_heads": 2, "patch_size": 4, "embedding_dim": 8}
    model = {"model": {"name": "vit", **vit}}
    config = tiny.config("faces", {"adapter": {"name": "prompt"}}, **model)
    trainer = build(config).stages["x"].trainer
    moving = jax.eval_shape(trainer.frozen_model.init, jax.random.key(0))
    names = {*trees.by_name(moving["params"])}
    assert "backbone/prompt" in names
    assert not any("encoder" in name for name in names)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (
            {"frozen": "head|backbone/stem"},
            "frozen must match leaves of params/backbone",
        ),
        ({"frozen": {"blocks": 1}, "personal": {"blocks": 1}}, "that are not frozen"),
        (
            {"features": "host", "distill": {"teacher": {"weights": "x"}}},
            "features must be auto or off with a teacher",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(method, words):
    with pytest.raises(ValueError, match=words) as error:
        build(tiny.config("faces", method))
    assert "\n" not in str(error.value)
