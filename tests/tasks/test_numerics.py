"""A row of any task computes in bfloat16, rematerialized and clipped, from a config.

And its running statistics are averaged or not, as the config says.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax import trees
from fedfr_jax.config.build import build
from fedfr_jax.federated.algorithms.personal import Server
from fedfr_jax.federated.simulation import simulate_round
from fedfr_jax.plan.shapes import stage_shapes
from fedfr_jax.runs.stages import start_stage
from fedfr_jax.types import GALLERY, QUERY, TRAIN, Masks, Source
from tests.federated import toys

pytestmark = pytest.mark.ci

PEOPLE, CAMERAS, SHAPE = 10, 2, (8, 8, 3)
TRUNK = {"blocks": (1, 1), "widths": (4, 8), "remat": True}
CIFAR = {**TRUNK, "stem": "cifar"}
IDS = {"num_clients": 2, "ids_per_client": 2, "num_public_ids": 4, "num_unseen_ids": 2}
DEALT = {"name": "iid", "num_clients": 2}
TASKS = {  # sections `model` and `partition`
    "faces": ({"name": "iresnet", **TRUNK, "embedding_dim": 8}, IDS),
    "classification": ({"name": "resnet", **CIFAR}, DEALT),
    "segmentation": ({"encoder": {"name": "resnet", **CIFAR}, "width": 4}, DEALT),
    "reid": ({"depth": 18, **CIFAR, "neck_dim": 4}, {"name": "by_camera"}),
}


def everything():
    """A source for every task: people, cameras, masks, training and test images."""
    each = np.meshgrid(*map(np.arange, (PEOPLE, CAMERAS, 4)), indexing="ij")
    person, camera, time = (x.reshape(-1) for x in each)
    draw = np.random.default_rng(0).integers
    images = draw(0, 256, (len(person), *SHAPE)).astype(np.uint8)
    masks = draw(0, 3, (len(person), *SHAPE[:2])).astype(np.uint8)
    tested = np.where(time == 0, QUERY, GALLERY)
    return Source(
        read=lambda rows: images[rows],
        labels=person.astype(np.int32),
        names=tuple(map(str, range(PEOPLE))),
        input_shape=SHAPE,
        cameras=camera.astype(np.int32),
        masks=Masks(lambda rows: masks[rows], ("sky", "road", "car")),
        roles=np.where(person < 8, TRAIN, tested).astype(np.uint8),
    )


def config(task, **more):
    model, partition = TASKS[task]
    row = {"algorithm": "fedavg", "learning_rate": 0.1, **more}
    return {
        "task": task,
        "data": {"name": "source_object", "source": everything()},
        "partition": partition,
        "model": {**model, "dtype": "bfloat16", "conv_implementation": "xla"},
        "pretrain": {"batch_size": 8} if task == "faces" else {},
        "federation": {"rounds": 1, "local_epochs": 1, "batch_size": 8},
        "methods": {"row": {**row, "momentum": 0.0, "weight_decay": 0.0}},
    }


def first_round(task, clip_norm, folder):
    """(params before, params after, metrics) of the server's network, on the host."""
    experiment = build(config(task, clip_norm=clip_norm))
    trainer, start = experiment.stages["row"].trainer, None
    if task == "faces":
        start = experiment.stages["pretrained"].trainer.init(jax.random.key(0))
    begun = start_stage(experiment, trainer, start, folder)
    begun.checkpointer.close()
    params = lambda server: jax.device_get(
        trainer.algorithm.global_model(server)["params"]
    )
    before = params(begun.server)
    server, outcome = simulate_round(begun.sim, begun.server, begun.store, 0)
    return before, params(server), outcome.metrics


@pytest.mark.parametrize("task", TASKS)
def test_a_client_computes_in_half_precision_and_blocks_again(task):
    """By its program. A segmenter's last layer has float32, three products of it."""
    experiment = build(config(task, clip_norm=1e-3))
    with jax.numpy_dtype_promotion("standard"):
        text = str(stage_shapes(experiment, "row").client.program)
    outputs = re.findall(r":(\w+)\[[^\n]*= conv_general_dilated\[", text)
    assert outputs.count("f32") == (3 if task == "segmentation" else 0), outputs
    assert outputs.count("bf16") > 10
    assert re.search(r"= (remat2|checkpoint)\[", text)


@pytest.mark.parametrize("task", toys.others_are_slow({("classification",)}, TASKS))
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
    server = stage_shapes(experiment, "row").server
    while isinstance(server, Server):  # beside what clients keep, or the first one has
        server = server.inner
    paths = jax.tree_util.tree_leaves_with_path(server)
    return {trees.path_name(path) for path, _ in paths}


@pytest.mark.parametrize("task", TASKS)
def test_statistics_that_are_not_averaged_are_not_in_what_is(task):
    every = averaged(task, "average")
    statistics = {name for name in every if "batch_stats" in name}
    assert any(name.endswith("/var") for name in statistics)
    for batch_stats in ("local", "random_client"):
        assert averaged(task, batch_stats) == every - statistics
