"""Batch statistics of one device, of a group, or of all: never by accident."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedfr_jax import mesh as meshes
from fedfr_jax.central.sharding import StepSharding, group_mean, group_size
from fedfr_jax.central.step import State, build_step
from fedfr_jax.mesh import make_mesh
from fedfr_jax.models.iresnet import iresnet
from fedfr_jax.models.norm import StatsGroup, stats_over_group
from fedfr_jax.types import Batch

MODEL = iresnet((8, 8, 3), blocks=(1,), widths=(4,), embedding_dim=6)


def step_of(num_devices, sync_batch_norm):
    """(gradients' step, statistics) of a batch of 16 on so many devices."""
    size = group_size(sync_batch_norm, num_devices)
    model = MODEL
    if size > 1:
        model = stats_over_group(MODEL, StatsGroup(size, group_mean(size, num_devices)))

    def loss(variables, batch, key):
        del key
        output, stats = model.apply(variables, batch.images, True)
        return jnp.mean(output * batch.inputs["want"]), (stats, {})

    mesh = make_mesh(num_devices)
    random = np.random.default_rng(0)
    inputs = {
        "image": random.normal(size=(16, 8, 8, 3)).astype(np.float32),
        "want": random.normal(size=(16, 6)).astype(np.float32),
    }
    numbers, always = np.arange(16, dtype=np.int32), np.ones(16, bool)
    rest = (always, always, numbers, numbers, numbers)
    batch = Batch(inputs, {"label": numbers}, np.int32(0), *rest)
    optimizer = optax.sgd(1.0)
    variables = MODEL.init(jax.random.key(0))
    step = jax.jit(build_step(loss, optimizer, mesh, StepSharding()))
    cut = lambda x: meshes.put_global(x, meshes.over_clients(mesh)) if x.ndim else x
    state = State(variables, optimizer.init(variables["params"]))
    state = meshes.put_global(state, meshes.replicated(mesh))
    args = state, jax.tree.map(cut, batch), jax.random.key(1)
    lowered = step.lower(*args)
    after, _ = lowered.compile()(*args)
    count = lowered.as_text().count("stablehlo.all_reduce")
    return jax.device_get(after.variables), count


@pytest.fixture(scope="module")
def one():
    return step_of(1, False)[0]


def test_pooled_statistics_of_all_devices_are_those_of_one(one):
    (synced, count), (local, few) = step_of(4, True), step_of(4, False)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    jax.tree.map(close, synced, one)
    far = jax.tree.map(lambda a, b: np.abs(a - b).max(), local["params"], one["params"])
    assert max(jax.tree.leaves(far)) > 1e-3
    # Alone the devices meet at the end of a step, for each leaf and the loss.
    assert few == len(jax.tree.leaves(one)) + 1
    assert count - few == 4 * 7  # mean and variance, there and back, of each layer


def test_a_group_of_devices_is_a_device_with_their_parts():
    grouped, _ = step_of(4, 2)
    alone, _ = step_of(2, False)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    jax.tree.map(close, grouped, alone)
