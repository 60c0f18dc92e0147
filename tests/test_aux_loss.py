"""A loss of any form, with convolutions and pooling that are fast on the devices."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedfr_jax.aux_loss import as_aux_loss, example_losses
from fedfr_jax.convolutions import use_forms
from fedfr_jax.losses.masked_means import masked_mean


class Network(nn.Module):
    """A network as a newcomer writes it."""

    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(nn.Conv(4, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.pooling.pool(x, 0.0, jax.lax.add, (2, 2), (1, 1), "VALID")
        return nn.Dense(1)(x.reshape(len(x), -1))


class Batch(NamedTuple):
    """What the losses here look at."""

    images: jax.Array
    is_valid: jax.Array


X = jnp.float32(np.random.default_rng(0).normal(size=(3, 8, 8, 2)))
VARIABLES = {**Network().init(jax.random.key(0), X), "batch_stats": {}}


def loss(variables, batch, key, scale=1.0):
    del key
    values = Network().apply({"params": variables["params"]}, batch.images)
    return scale * masked_mean(values[:, 0] ** 2, batch.is_valid)


def gradient(loss, variables, images, **more):
    batch = Batch(images, jnp.array([True, True, False]))
    run = lambda v: loss(v, batch, jax.random.key(0), **more)
    return jax.value_and_grad(run, has_aux=True)(variables)


def test_a_users_network_has_no_operation_left_that_is_slow():
    def text():
        run = lambda *arrays: gradient(as_aux_loss(loss), *arrays)
        return str(jax.make_jaxpr(run)(VARIABLES, X))

    slow = ("conv_general_dilated", "reduce_window", "select_and_scatter")
    assert not any(name in text() for name in slow)
    with use_forms("xla"):
        assert all(name in text() for name in slow)


def test_the_value_metrics_and_gradients_are_the_losses():
    def with_metrics(*arguments, **more):
        return loss(*arguments, **more), {"one": jnp.float32(1)}

    def run(loss):
        return jax.jit(lambda *a: gradient(loss, *a, scale=2.0))(VARIABLES, X)

    (want, _), want_grads = run(lambda *a, **more: (loss(*a, **more), None))
    for given in (loss, with_metrics):
        (value, (stats, metrics)), grads = run(as_aux_loss(given))
        assert stats == {} and [*metrics] == (["one"] if given is with_metrics else [])
        np.testing.assert_allclose(value, want, rtol=1e-5)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        jax.tree.map(close, grads, want_grads)
    with pytest.raises(ValueError, match="must return a mean"):
        as_aux_loss(lambda *a: X)(VARIABLES, None, None)


def test_the_loss_of_each_example_is_that_of_a_batch_of_it():
    batch = Batch(X, jnp.ones(3, bool))
    run = lambda v: example_losses(as_aux_loss(loss), v, batch, jax.random.key(0))
    values = Network().apply({"params": VARIABLES["params"]}, X)[:, 0] ** 2
    np.testing.assert_allclose(jax.jit(run)(VARIABLES), values, rtol=1e-4, atol=1e-6)
