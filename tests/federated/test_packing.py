"""A packed network is the same network, and nobody around the algorithm sees it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.data.batching import Batching
from fedfr_jax.federated import parameter_packing
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.parameter_packing import (
    PackedVariables,
    pack_networks,
    unpack,
)
from fedfr_jax.federated.simulation import build_simulation, start_simulation
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models import MODELS
from fedfr_jax.types import Dataset
from tests.federated import toys
from tests.tasks.faces import given

pytestmark = pytest.mark.ci

SHAPE = (8, 8, 3)
NETWORKS = {
    "iresnet": {"blocks": (1,), "widths": (4,), "embedding_dim": 5},
    "sphereface": {"blocks": (1, 1), "widths": (4, 6), "embedding_dim": 5},
}


@pytest.fixture(params=[parameter_packing.MAX_LEAF_SIZE, 40])
def packs_everything(monkeypatch, request):
    """Every leaf in one vector, or only those of at most 40 numbers."""
    monkeypatch.setattr(parameter_packing, "MIN_LEAVES", 1)
    monkeypatch.setattr(parameter_packing, "MAX_LEAF_SIZE", request.param)


def network(name):
    return MODELS[name](SHAPE, **NETWORKS[name])


def images(count):
    return jax.random.normal(jax.random.key(1), (count, *SHAPE))


@pytest.mark.parametrize("name", NETWORKS)
def test_unpacking_gives_every_leaf_its_name_back(name, packs_everything):
    named = network(name).init(jax.random.key(0))
    packed = pack_networks({"backbone": named})
    assert len(jax.tree.leaves(packed)) < len(jax.tree.leaves(named))
    jax.tree.map(np.testing.assert_array_equal, unpack(packed), {"backbone": named})


@pytest.mark.slow
def test_fedfr_trains_a_packed_network_as_a_named_one_and_hands_out_names(monkeypatch):
    model, ends = network("iresnet"), []
    labels = jnp.arange(16, dtype=jnp.int32) % 4
    table = Dataset.from_arrays(images(16), labels)
    population = Population(np.array([0, 4, 8]), np.full(2, 4, np.int32))
    backbone = model.init(jax.random.key(0))
    for fewest in (1, 1000):
        monkeypatch.setattr(parameter_packing, "MIN_LEAVES", fewest)
        options = {"num_classes": 4, "learning_rate": 0.1, "branch": None}
        method = given.method_of(model, **options)
        algorithm = method.algorithm
        sim = build_simulation(
            algorithm, Batching(4), table, population, mesh=make_mesh(1)
        )
        phi = jax.random.normal(jax.random.key(2), (4, 5))
        server = start_simulation(sim, method.init_variables(backbone, phi))
        assert isinstance(given.backbone(server)["params"], PackedVariables) == (
            fewest == 1
        )
        server, rows, *_ = toys.play_rounds(sim, server)
        row = jax.tree.map(lambda x: x[0], rows)
        own = algorithm.personalize(server, row)
        ends.append((method.generic(server), own, given.phi(server)))
        drawn = given.method_of(
            model, **options, initial_previous_model="random"
        ).algorithm
        new = jax.eval_shape(drawn.init_personal, jax.random.key(0), server)
        assert jax.tree.structure(new) == jax.tree.structure(row)
    toys.assert_close(*ends, rtol=1e-4, atol=1e-4)
    assert np.any(ends[0][0]["batch_stats"]["stem"]["bn"]["mean"] != 0)
    deployed = ends[0][1]["params"]["backbone"]
    assert jax.tree.structure(deployed) == jax.tree.structure(backbone["params"])
