"""A bundled network is the same network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.federated.client import Population
from fedfr_jax.federated.simulation import open_store, play, simulation, start
from fedfr_jax.feed import Feed
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models import MODELS, bundle
from fedfr_jax.tasks.faces.methods import federated_faces
from fedfr_jax.types import Dataset

SHAPE = (8, 8, 3)
NETWORKS = {
    "iresnet": {"blocks": (2,), "widths": (4,), "embedding_dim": 5},
    "sphereface": {"blocks": (1, 1), "widths": (4, 6), "embedding_dim": 5},
}


@pytest.fixture(params=[bundle.LARGEST, 40])
def bundles_everything(monkeypatch, request):
    """Every leaf in one vector, or only those of at most 40 numbers."""
    monkeypatch.setattr(bundle, "FEWEST", 1)
    monkeypatch.setattr(bundle, "LARGEST", request.param)


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
def test_unbundling_a_bundle_gives_every_leaf_its_name_back(name, bundles_everything):
    named = network(name).init(jax.random.key(0))
    _, pack, unpack = bundle.bundled(network(name))
    assert len(jax.tree.leaves(pack(named))) < len(jax.tree.leaves(named))
    jax.tree.map(np.testing.assert_array_equal, unpack(pack(named)), named)


@pytest.mark.parametrize("train", [False, True])
def test_a_bundled_network_has_the_features_and_the_statistics(
    train, bundles_everything
):
    model = network("iresnet")
    packed, pack, unpack = bundle.bundled(model)
    named = model.init(jax.random.key(0))
    run = lambda model, variables: jax.jit(model.apply, static_argnums=2)(
        variables, images(4), train
    )
    features, stats = run(model, named)
    again, packed_stats = run(packed, pack(named))
    assert_close(again, features)
    after = unpack({**pack(named), "batch_stats": packed_stats})
    assert_close(after["batch_stats"], stats)
    moved = [
        np.any(x != y)
        for x, y in zip(*map(jax.tree.leaves, (named, after)), strict=True)
    ]
    assert any(moved) == train


def test_the_gradient_of_a_bundle_is_that_of_its_leaves(bundles_everything):
    model = network("iresnet")
    packed, pack, unpack = bundle.bundled(model)
    named = model.init(jax.random.key(0))
    loss = lambda model, v: jnp.sin(model.apply(v, images(4), True)[0]).sum()
    of_leaves = jax.jit(jax.grad(lambda v: loss(model, v)))(named)
    of_bundle = jax.jit(jax.grad(lambda v: loss(packed, v)))(pack(named))
    assert_close(unpack(of_bundle)["params"], of_leaves["params"], 1e-4)


def test_a_bundled_network_hands_on_the_key(bundles_everything):
    model = MODELS["iresnet"](SHAPE, **NETWORKS["iresnet"], dropout=0.5)
    packed, pack, _ = bundle.bundled(model)
    named, key = model.init(jax.random.key(0)), jax.random.key(1)
    run = lambda model, variables: jax.jit(
        lambda v: model.apply(v, images(4), train=True, key=key)[0]
    )(variables)
    assert_close(run(packed, pack(named)), run(model, named))


def test_a_network_of_few_small_leaves_stays_as_it_is():
    model = network("sphereface")
    assert bundle.bundled(model).model is model


def test_small_leaves_of_two_dtypes_stay_as_they_are(bundles_everything):
    leaves = {"a": jnp.zeros(3), "b": jnp.zeros(3, jnp.bfloat16)}
    model = network("sphereface")._replace(
        init=lambda key: {"params": leaves, "batch_stats": {}}
    )
    assert bundle.bundled(model).model is model


def test_fedfr_trains_a_bundled_network_as_a_named_one(monkeypatch):
    model, ends = network("iresnet"), []
    labels = jnp.arange(16, dtype=jnp.int32) % 4
    table = Dataset.labelled(images(16), labels)
    population = Population(np.array([0, 4, 8]), np.full(2, 4, np.int32))
    for fewest in (1, 1000):
        monkeypatch.setattr(bundle, "FEWEST", fewest)
        method = federated_faces(model, num_classes=4, learning_rate=0.1, branch=None)
        sim = simulation(
            method.algorithm, Feed(4), table, population, mesh=make_mesh(1)
        )
        phi = jax.random.normal(jax.random.key(2), (4, 5))
        server = start(sim, method.start(model.init(jax.random.key(0)), phi))
        server, _ = play(sim, server, open_store(sim, server), 0)
        ends.append((method.generic(server), server.phi))
    assert_close(*ends, tolerance=1e-4)
    assert np.any(ends[0][0]["batch_stats"]["stem"]["bn"]["mean"] != 0)
