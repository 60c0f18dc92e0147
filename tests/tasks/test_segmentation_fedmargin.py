"""FedMargin on masks: prototypes of pixels through the engine, against a plain loop."""

import jax
import numpy as np
import pytest

from fedfr_jax.config.build import build
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    start_simulation,
)
from fedfr_jax.models import MODELS
from fedfr_jax.models.frozen import whole_variables
from fedfr_jax.types import IGNORE_INDEX
from tests.federated.toys import simulate_round

# The encoder stays, so that prototypes of every round are those of the first network.
ROW = {
    "algorithm": "fedmargin",
    "learning_rate": 0.3,
    "frozen": {"all_but_blocks": 2},
    "loss": {"class_weights": (1.0, 2.0, 1.0)},
    "local_epochs": 2,
}


def plain_prototypes(model, variables, dataset):
    """(means [M, D], numbers [M]) of features, pixel after pixel."""
    images = np.asarray(dataset.images).astype(np.float32) / 127.5 - 1
    look = jax.jit(lambda v: model.apply_with_features(v, images, False)[1])
    features = np.asarray(look(variables))
    length = np.linalg.norm(features, axis=-1, keepdims=True)
    features = features / np.maximum(length, 1e-12)  # a pixel may have none
    height, width = features.shape[1:3]
    seen = {number: [] for number in (0, 1, 2, IGNORE_INDEX)}
    for mask, found in zip(dataset.targets["mask"], np.asarray(features), strict=True):
        for i in range(height):
            for j in range(width):
                row, column = i * mask.shape[0] // height, j * mask.shape[1] // width
                seen[int(mask[row, column])].append(found[i, j])
    assert seen.pop(IGNORE_INDEX)
    return np.array([np.mean(x, 0) for x in seen.values()]), list(
        map(len, seen.values())
    )


@pytest.mark.slow
def test_prototypes_are_means_over_the_pixels_of_all_clients_but_void(config):
    given = config(methods={"row": ROW})
    given["model"] |= {"norm": "group", "norm_groups": 2}
    experiment = build(given)
    trainer, task = experiment.stages["row"].trainer, experiment.task
    sim = build_simulation(
        trainer.algorithm,
        experiment.batching,
        task.dataset,
        task.population,
        Settings(local_epochs=trainer.local_epochs),
        mesh=experiment.mesh,
    )
    first = trainer.init_variables(None)
    network = {"num_classes": 3, **given["model"]}
    model = MODELS["segmenter"]((12, 16, 3), **network)
    whole = whole_variables(trainer.frozen_model, first)
    means, numbers = plain_prototypes(model, whole, task.dataset)
    server = start_simulation(sim, first)
    store = open_store(sim, server)
    sizes = np.diff(task.population.offsets)
    for r in range(2):
        server, outcome = simulate_round(sim, server, store, r)
        np.testing.assert_allclose(server.prototypes.mean, means, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(server.prototypes.number, numbers, rtol=1e-4)
        steps = trainer.local_epochs * -(-sizes // 4)
        np.testing.assert_array_equal(outcome.metrics["steps"], steps)
        assert all(np.isfinite(x).all() for x in outcome.metrics.values())
    params, before = jax.device_get((server.variables["params"], first["params"]))
    moved = {name for name, leaves in params.items() if jax.tree.leaves(leaves)}
    assert moved == {"up1", "classifier"}
    for name in moved:
        is_moved = jax.tree.map(
            lambda x, y: not (x == y).all(), params[name], before[name]
        )
        assert all(jax.tree.leaves(is_moved)), name
