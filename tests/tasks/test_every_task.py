"""What holds in every task: runs, streams, numerics, running statistics."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax import trees
from fedfr_jax.config.build import build
from fedfr_jax.convolutions import use_forms
from fedfr_jax.data.stream import Stream
from fedfr_jax.federated.algorithms.personal import ServerWithLayers
from fedfr_jax.runs.experiment import evaluate_experiment, run_experiment
from fedfr_jax.runs.shapes import stage_shapes
from fedfr_jax.runs.stages import start_stage
from tests.federated import toys
from tests.tasks import tiny

pytestmark = pytest.mark.ci

SOME = toys.others_are_slow({("classification",)}, tiny.TASKS)
TRUNK = {"blocks": (1, 1), "widths": (4, 8), "remat": True}
CIFAR = {**TRUNK, "stem": "cifar"}
MODELS = {
    "faces": {"name": "iresnet", **TRUNK, "embedding_dim": 8},
    "classification": {"name": "resnet", **CIFAR},
    "segmentation": {"encoder": {"name": "resnet", **CIFAR}, "width": 4},
    "reid": {"depth": 18, **CIFAR, "neck_dim": 4},
}


def config(task, **method):
    """The task's tiny config with a deeper network, in bfloat16."""
    plain = {"algorithm": "fedavg", "momentum": 0.0, "weight_decay": 0.0}
    given = tiny.config(task, {**plain, **method})
    return {**given, "model": {**MODELS[task], "dtype": "bfloat16"}}


def first_round(task, clip_norm, folder):
    """(params before, params after, metrics) of the server's network, on the host."""
    experiment = build(config(task, clip_norm=clip_norm))
    trainer, start = experiment.stages["x"].trainer, None
    if task == "faces":
        start = experiment.stages["pretrained"].trainer.init(jax.random.key(0))
    begun = start_stage(experiment, trainer, start, folder)
    begun.checkpointer.close()
    params = lambda server: jax.device_get(
        trainer.algorithm.global_model(server)["params"]
    )
    before = params(begun.server)
    server, outcome = toys.simulate_round(begun.sim, begun.server, begun.store, 0)
    return before, params(server), outcome.metrics


@pytest.mark.parametrize("task", tiny.TASKS)
def test_a_client_computes_in_half_precision_and_blocks_again(task):
    """By its program. A segmenter's last layer has float32, three products of it."""
    experiment = build(config(task, clip_norm=1e-3))
    with jax.numpy_dtype_promotion("standard"), use_forms("xla"):
        text = str(stage_shapes(experiment, "x").client.program)
    outputs = re.findall(r":(\w+)\[[^\n]*= conv_general_dilated\[", text)
    assert outputs.count("f32") == (3 if task == "segmentation" else 0), outputs
    assert outputs.count("bf16") > 10
    assert re.search(r"= (remat2|checkpoint)\[", text)


@pytest.mark.parametrize("task", SOME)
def test_half_precision_trains_float32_parameters(task, tmp_path):
    before, after, metrics = first_round(task, 1e-3, tmp_path)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(after))
    assert np.isfinite(metrics["loss"]).all() and (metrics["steps"] > 0).all()
    moved = jax.tree.map(lambda a, b: np.square(a - b).sum(), before, after)
    length = np.sqrt(sum(jax.tree.leaves(moved)))
    # Steps of at most rate * clip_norm, which add up no further than straight on.
    assert 0 < length <= 0.1 * 1e-3 * metrics["steps"].max() * 1.01


def averaged(task, batch_stats):
    """Names of the leaves of the server's state that a round averages."""
    experiment = build(config(task, batch_stats=batch_stats))
    server = stage_shapes(experiment, "x").server
    # Beside it is what clients keep, or the first one has.
    while isinstance(server, ServerWithLayers):
        server = server.inner
    return {*trees.by_name(server)}


@pytest.mark.parametrize("task", SOME)
def test_statistics_that_are_not_averaged_are_not_in_what_is(task):
    every = averaged(task, "average")
    statistics = {name for name in every if "batch_stats" in name}
    assert any(name.endswith("/var") for name in statistics)
    for batch_stats in ("local", "random_client"):
        assert averaged(task, batch_stats) == every - statistics


def run(config, folder):
    """(experiment, its numbers by method) of a config."""
    experiment = build(config)
    with jax.numpy_dtype_promotion("standard"):  # which optax's schedules need
        return experiment, run_experiment(experiment, folder)["methods"]


@pytest.mark.parametrize("task", SOME)
def test_a_run_is_evaluated_again_and_streamed_to_the_same_numbers(task, tmp_path):
    given = tiny.config(task, {"algorithm": "fedavg"})
    given["evaluation"] = (
        {} if task in ("faces", "classification") else {"num_visualized": 0}
    )
    central = {"kind": "central", "epochs": 1, "batch_size": 16}  # two on a device
    given["methods"]["central"] = central
    experiment, found = run(given, tmp_path / "resident")
    assert found.keys() - {"pretrained"} == {"x", "central"}
    assert all(of["generic"] and of["personalized"] for of in found.values())
    again = evaluate_experiment(experiment, tmp_path / "resident")["methods"]
    assert again == found
    given["federation"] = {**given["federation"], "data_placement": "stream"}
    streamed, numbers = run(given, tmp_path / "streamed")
    assert isinstance(streamed.task.dataset, Stream)
    for name, of in found.items():
        for evaluator, metrics in of.items():
            assert numbers[name][evaluator] == pytest.approx(metrics, abs=1e-5), name
    read = streamed.task.dataset.take(rows := np.array([20, 3, 4]))
    resident = experiment.task.dataset
    np.testing.assert_array_equal(read.images, resident.images[rows])
    for name, values in resident.targets.items():
        np.testing.assert_array_equal(read.targets[name], values[rows])
