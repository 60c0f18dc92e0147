"""LARS and SGD against the released ones, and the linear scaling rule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedfr_jax.central.optimizers import OPTIMIZERS
from fedfr_jax.central.settings import Training, build_optimizer


def trajectory(optimizer, start, grads):
    params, state = start, optimizer.init(start)
    for grad in grads:
        updates, state = optimizer.update(grad, state, params)
        params = optax.apply_updates(params, updates)
        yield params


@pytest.mark.parametrize(
    "name, key", [("lars", "lars/optax"), ("sgd", "sgd/w_after_each_step")]
)
def test_an_optimizer_follows_the_released_one(golden, name, key):
    g = golden("bigface_optim")
    rates = jnp.asarray(g["sgd/lrs"], jnp.float32)
    optimizer = OPTIMIZERS[name](lambda step: rates[step], 5e-4)
    found = list(trajectory(optimizer, jnp.asarray(g["sgd/w0"]), g["sgd/grads"]))
    np.testing.assert_allclose(found, g[key], rtol=1e-5, atol=1e-7)


def test_lars_takes_each_block_of_a_stack_alone_and_leaves_vectors():
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
    optimizer = OPTIMIZERS["lars"](0.1, 5e-4)
    stacked = {"block[2:5]": {"kernel": draw(3, 4, 5), "bias": draw(3, 5)}}
    grads = jax.tree.map(lambda x: draw(*x.shape), stacked)
    (moved,) = trajectory(optimizer, stacked, [grads])
    kernel, bias = (moved["block[2:5]"][name] for name in ("kernel", "bias"))
    for i in range(3):
        of = lambda tree, i=i: {"block2": {"kernel": tree["block[2:5]"]["kernel"][i]}}
        (alone,) = trajectory(optimizer, of(stacked), [of(grads)])
        np.testing.assert_allclose(kernel[i], alone["block2"]["kernel"], rtol=1e-6)
    step = 0.1 * grads["block[2:5]"]["bias"]  # neither decay nor ratio
    np.testing.assert_allclose(bias, stacked["block[2:5]"]["bias"] - step, rtol=1e-5)


def test_adams_decay_is_decoupled_and_the_coupled_ones_part_of_the_gradient():
    start, grad = jnp.full(3, 2.0), jnp.ones(3)
    steps = {"adam": 0.1 * (1 + 0.5 * 2), "adam_coupled": 0.1}  # sign(1 + 0.5 * 2)
    for name, step in steps.items():
        with jax.numpy_dtype_promotion("standard"):  # for optax's Adam
            (moved,) = trajectory(OPTIMIZERS[name](0.1, 0.5), start, [grad])
        np.testing.assert_allclose(moved, 2 - step, rtol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_layer_has_a_rate_of_its_own(name):
    """As if all leaves had it, since a leaf's steps are of its own gradients."""
    draw = np.random.default_rng(0).normal
    start = {k: jnp.asarray(draw(size=(3, 2)), jnp.float32) for k in ("stem", "top")}
    grads = [jax.tree.map(lambda x: 0.1 * x + 1, start)] * 3

    def end(rate, **settings):
        given = {
            "optimizer": name,
            "learning_rate": rate,
            "warmup_fraction": 0.0,
            **settings,
        }
        with jax.numpy_dtype_promotion("standard"):  # for optax's schedules
            optimizer = build_optimizer(Training(epochs=1, **given), 1000)
            return list(trajectory(optimizer, start, grads))[-1]

    found = end(0.1, learning_rate_multipliers={"^stem": 0.25})
    np.testing.assert_allclose(found["stem"], end(0.025)["stem"], rtol=1e-5)
    np.testing.assert_allclose(found["top"], end(0.1)["top"], rtol=1e-6)
