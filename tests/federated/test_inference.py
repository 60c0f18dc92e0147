"""Evaluation computes convolutions in the platform's form, as training does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives

from fedfr_jax.convolutions import FORMS
from fedfr_jax.convolutions.conv import convolution
from fedfr_jax.data.augment import normalize
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated import model_parallel
from fedfr_jax.federated.inference import build_embed, build_sums, client_models
from fedfr_jax.federated.simulation import open_store, start_simulation
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Dataset
from tests.federated import toys

NUMBER, BATCH = 6, 4
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (NUMBER, 5, 4, 1)).astype(np.uint8)
KERNEL = RNG.normal(size=(3, 3, 1, 2)).astype(np.float32)
DATA = Dataset.from_arrays(IMAGES, np.arange(NUMBER, dtype=np.int32))
ROWS, FEED = np.arange(NUMBER, dtype=np.int32), Batching(BATCH, normalize())


def features(kernel, images):
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=numbers
    )
    return y.reshape(len(y), -1)


def large(kernel, inputs, targets, is_valid):
    del targets
    return jnp.sum((features(kernel, inputs["image"]) > 1) & is_valid[:, None])


@pytest.mark.parametrize("build", [build_embed, build_sums])
def test_the_forms_of_the_platform_are_used(build, monkeypatch):
    seen = []

    def form(x, kernel, **params):
        seen.append(x.shape)
        return convolution(x, kernel, **params)

    monkeypatch.setitem(FORMS["cpu"], primitives.conv_general_dilated_p, form)
    run = build(features if build is build_embed else large, FEED, make_mesh(1))
    found = np.asarray(run(KERNEL, DATA, ROWS))
    assert set(seen) == {(BATCH, 5, 4, 1)}
    want = np.asarray(features(KERNEL, np.float32(IMAGES) / 127.5 - 1))
    if build is build_embed:
        np.testing.assert_allclose(found[:NUMBER, 0], want, atol=1e-5)
    else:
        assert found == (want > 1).sum() > 0


@pytest.mark.parametrize("name", ["fedavg", "fedfr"])
@pytest.mark.parametrize("mesh", [(4, 1), (2, 2)], ids=str)
def test_models_on_each_device_are_those_of_single_clients(name, mesh, monkeypatch):
    """Of clients with states and without, and of ones that never take part."""
    monkeypatch.setattr(model_parallel, "SMALLEST", 16)  # the toys' leaves are small
    options = {"fedavg": {"personal": "head"}, "fedfr": {}}[name]
    algorithm, variables = toys.TOYS[name](**options)
    sim = toys.build(algorithm, mesh=mesh, cohort_size=2, local_epochs=1, seed=7)
    server = start_simulation(sim, variables)
    store = open_store(sim, server)
    server, _ = toys.simulate_round(sim, server, store, 0)
    assert len(store.touched()) == 2
    models = client_models(sim.algorithm, server, sim.key, store, sim.mesh)
    for model in models:
        for start in range(0, 5, mesh[0]):
            clients = np.resize(np.arange(start, min(start + mesh[0], 5)), mesh[0])
            found = model(clients)
            for i, client in enumerate(clients):
                of_one = jax.tree.map(lambda x, i=i: x[i], found)
                toys.assert_close(of_one, model(int(client)), 1e-6, 1e-6)
            for x in jax.tree.leaves(found):
                assert {shard.data.shape[0] for shard in x.addressable_shards} == {1}
