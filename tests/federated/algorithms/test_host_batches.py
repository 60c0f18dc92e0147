"""Batches that the host lists: clients of any algorithm, and central training."""

import functools

import jax
import numpy as np
import optax
import pytest

import fedfr_jax as ff
from fedfr_jax.central.batches import EpochOrder
from fedfr_jax.data.batching import Batching
from fedfr_jax.federated.algorithms.host_batches import with_host_batches
from fedfr_jax.federated.client import Population
from fedfr_jax.federated.settings import Settings
from fedfr_jax.federated.simulation import build_simulation
from fedfr_jax.mesh import make_mesh
from fedfr_jax.types import Batch, Dataset, LocalTraining
from tests.federated import toys

SIZES = np.array([5, 8, 3])
BATCH, STEPS = 4, 2
OFFSETS = np.cumsum([0, *SIZES])


def examples():
    rng = np.random.default_rng(0)
    images = rng.normal(size=(SIZES.sum(), 5)).astype(np.float32)
    return images, rng.integers(0, 3, len(images)).astype(np.int32)


def order(client, round):
    """Positions [S, B], with repeats."""
    rng = np.random.default_rng((client, round))
    return rng.integers(0, SIZES[client], (STEPS, BATCH)).astype(np.int32)


@functools.cache
def variables():
    return jax.tree.map(np.float32, toys.unflat(np.linspace(-1, 1, 18)))


def plain_loop(rounds):
    """FedAvg whose clients take the listed rows one batch after the other."""
    images, labels = examples()
    params = variables()["params"]
    gradient = jax.jit(jax.grad(lambda p, b: toys.loss_fn(of(p), b, None)[0]))
    of = lambda p: {"params": p, "batch_stats": {}}
    for r in range(rounds):
        ends = []
        for client in range(len(SIZES)):
            own, step_params = OFFSETS[client] + order(client, r), params
            for rows in own[: -(-SIZES[client] // BATCH)]:
                batch = Batch(
                    *({"image": images[rows]}, {"label": labels[rows]}, 3),
                    *(np.ones(BATCH, bool), None, None, None, None),
                )
                step = optax.tree.scale(-0.1, gradient(step_params, batch))
                step_params = optax.tree.add(step_params, step)
            ends.append(step_params)
        mean = lambda *x: np.average(x, axis=0, weights=SIZES)
        params = jax.tree.map(mean, *ends)
    return params


@pytest.mark.parametrize("where", [(1, 1), (2, 2)])
def test_clients_train_on_the_listed_batches(where):
    images, labels = examples()
    local = LocalTraining(toys.loss_fn, ff.sgd(), lambda round, epoch: np.float32(0.1))
    algorithm = with_host_batches(ff.with_personal_layers(ff.fedavg(local), ""), order)
    sim = build_simulation(
        *(algorithm, Batching(BATCH), Dataset.from_arrays(images, labels)),
        Population(OFFSETS, np.full(3, 3, np.int32)),
        Settings(clients_per_device=where[1]),
        mesh=make_mesh(where[0]),
    )
    end = toys.play(sim, variables(), 2)
    np.testing.assert_array_equal(end.logs[1].metrics["steps"], [2, 2, 1])
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, end.server.variables["params"], plain_loop(2))


def test_central_steps_take_the_listed_rows_on_every_device():
    lists = lambda word, steps: (word + np.arange(steps * 8).reshape(steps, 8)) % 30
    one = EpochOrder(4, 30, 8, 1, seed=0, batch_order=lists)
    two = one._replace(num_devices=2)
    listed = lists(one.word(0), one.num_steps)
    rows = one.rows(one.word(0), 1, 2, listed)
    np.testing.assert_array_equal(rows[0], 4 + listed[1:3])
    halves = two.rows(two.word(0), 1, 2, listed)
    np.testing.assert_array_equal(np.concatenate(halves, axis=1), rows[0])
    behind = one.rows(one.word(0), 2, 5, listed)  # filled up with rows of the epoch
    assert behind.max() < 34 and behind.min() >= 4
