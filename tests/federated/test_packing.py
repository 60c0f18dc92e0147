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
    on_unpacked,
    pack_networks,
    unpack,
)
from fedfr_jax.federated.simulation import (
    build_simulation,
    open_store,
    simulate_round,
    start_simulation,
)
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models import MODELS
from fedfr_jax.types import Dataset
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


def assert_close(a, b, tolerance=1e-5):
    close = lambda x, y: np.testing.assert_allclose(
        x, y, rtol=tolerance, atol=tolerance
    )
    jax.tree.map(close, a, b)


@pytest.mark.parametrize("name", NETWORKS)
def test_unpacking_gives_every_leaf_its_name_back(name, packs_everything):
    named = network(name).init(jax.random.key(0))
    packed = pack_networks({"backbone": named})
    assert len(jax.tree.leaves(packed)) < len(jax.tree.leaves(named))
    jax.tree.map(np.testing.assert_array_equal, unpack(packed), {"backbone": named})


@pytest.mark.parametrize("train", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_packed_network_has_the_features_the_statistics_and_the_gradients(
    train, packs_everything
):
    model = network("iresnet")
    named = model.init(jax.random.key(0))

    @jax.jit
    def run(variables):
        def loss(params):
            given = {**variables, "params": params}
            features, stats = on_unpacked(model).apply(given, images(4), train)
            return jnp.sin(features).sum(), (features, stats)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])

    packed = run(pack_networks(named))
    assert isinstance(packed[0][1][1], PackedVariables)
    assert_close(unpack(packed), run(named), 1e-4)
    moved = unpack(packed)[0][1][1]["stem"]["bn"]["mean"]
    assert bool(np.any(moved != 0)) == train


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
        store = open_store(sim, server)
        server, _ = simulate_round(sim, server, store, 0)
        row = jax.tree.map(lambda x: x[0], store.gather(np.arange(2))[0])
        own = algorithm.personalize(server, row)
        ends.append((method.generic(server), own, given.phi(server)))
        drawn = given.method_of(
            model, **options, initial_previous_model="random"
        ).algorithm
        new = jax.eval_shape(drawn.init_personal, jax.random.key(0), server)
        assert jax.tree.structure(new) == jax.tree.structure(row)
    assert_close(*ends, tolerance=1e-4)
    assert np.any(ends[0][0]["batch_stats"]["stem"]["bn"]["mean"] != 0)
    deployed = ends[0][1]["params"]["backbone"]
    assert jax.tree.structure(deployed) == jax.tree.structure(backbone["params"])
