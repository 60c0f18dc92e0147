"""Frozen features that are looked up are those that a step would compute."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.data.augment import horizontal_flip
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import build_simulation
from fedfr_jax.mesh import make_mesh
from fedfr_jax.tasks.faces.frozen_features import own_class_means
from fedfr_jax.types import Augment
from tests.federated import toys
from tests.tasks.faces import given

# The same mirroring, whose views nobody counts.
UNCOUNTED = Augment(horizontal_flip().apply)


def two_rounds(augment, **options):
    """Two rounds of FedFR whole."""
    algorithm, variables = toys.fedfr_toy()
    feed, (table, population) = toys.feed(augment=augment), toys.problem()
    settings = Settings(**{"cohort_size": 3, "local_epochs": 2, **options})
    parts = algorithm, feed, table, population, settings
    sim = build_simulation(*parts, mesh=make_mesh(2))
    return toys.play(sim, variables, 2)


@pytest.mark.ci
@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_known_and_computed_features_train_alike(lanes):
    known = two_rounds(toys.MIRROR, clients_per_device=lanes)
    computed = two_rounds(UNCOUNTED, clients_per_device=lanes)
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    for a, b in zip(known.logs, computed.logs, strict=True):
        assert a.num_added.any()  # selected by their plain views in both
        np.testing.assert_array_equal(a.num_added, b.num_added)
        jax.tree.map(close, a.metrics, b.metrics)
    jax.tree.map(close, known[:2], computed[:2])


def test_class_means_leave_out_what_is_no_example_of_the_clients_own():
    features = np.float32([[1, 0], [3, 2], [5, 5], [9, 9]])

    def span(start, view):
        take = lambda x: jax.lax.dynamic_slice_in_dim(jnp.asarray(x), start, 2)
        return given.batch_of(
            take(features),
            take(np.int32([1, 1, 0, 0])),
            is_valid=take(np.array([True, True, True, False])),
            is_added=take(np.array([False, False, True, False])),
        )

    client = SimpleNamespace(batch_from=span, num_examples=jnp.int32(3))
    found = own_class_means(lambda _, images: images, None, client, num_classes=3)
    np.testing.assert_array_equal(found, [[0, 0], [2, 1], [0, 0]])
