"""Lanes side by side have the gradients of lanes in front, each its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

from fedfr_jax.convolutions import use_forms, value_and_grad
from fedfr_jax.models.norm import normalize, prelu

LANES, BATCH = 6, 3


class Narrow(nn.Module):
    """Operations that lanes share, with derivatives of their own; some mix channels."""

    groups: int = 1  # of the last but one convolution

    @nn.compact
    def __call__(self, x, shift):
        x = nn.relu(nn.Conv(8, (3, 3), padding="VALID")(x))
        x = nn.Conv(12, (3, 3), strides=2, use_bias=False)(x) * shift
        scale = self.param("scale", nn.initializers.normal(), (12,))
        x, mean, _ = normalize(x, 1 + scale, scale, 1e-5)
        x = prelu(x - x.max((1, 2), keepdims=True), scale + mean)
        sums = nn.pooling.pool(x, 0.0, lax.add, (2, 2), (2, 2), "VALID")
        x = sums / 4 + nn.max_pool(x, (2, 2), (2, 2))
        x = nn.Conv(16, (1, 1))(
            jnp.pad(nn.softmax(x), ((0, 0), (1, 0), (0, 0), (0, 0)))
        )
        x = nn.silu(x) + nn.Conv(16, (3, 3), feature_group_count=self.groups)(x)
        return nn.Dense(5)(nn.Conv(64, (3, 3))(x).reshape(len(x), -1))


def arrays(groups=1):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (LANES, BATCH, 12, 10, 3))
    labels = jax.random.randint(keys[1], (LANES, BATCH), 0, 5)
    init = jax.vmap(Narrow(groups).init, (0, 0, None))
    return jax.jit(init)(jax.random.split(keys[2], LANES), x, 1.0), x, labels


def gradients(groups, shift, params, x, labels):
    """((loss, its parts), gradients) of a client."""

    def loss(params):
        logits = nn.log_softmax(Narrow(groups).apply(params, x, shift))
        own = jnp.take_along_axis(logits, labels[:, None], 1)
        return -own.mean(), {"own": own, "constant": jnp.arange(3)}

    return value_and_grad(loss)(params)


def of_lanes(forms, groups=1, shift=1.5, axes=(None, 0, 0, 0)):
    """`gradients` of lanes, compiled with the forms of a platform."""
    shift = jnp.asarray(shift, jnp.float32)

    def run(*inputs):
        with use_forms(forms):
            of_client = functools.partial(gradients, groups)
            return jax.vmap(of_client, axes)(shift, *inputs)

    return jax.jit(run)


CASES = {
    "all": {},
    "a scalar of each lane": {"shift": np.linspace(1, 2, LANES), "axes": (0, 0, 0, 0)},
    "shared parameters": {"axes": (None, None, 0, 0)},
    "grouped layer": {"groups": 4},
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_lanes_in_front(name):
    case = CASES[name]
    params, x, labels = arrays(case.get("groups", 1))
    if "parameters" in name:  # as before the first step
        params = jax.tree.map(lambda x: x[0], params)
    inputs = params, x, labels
    expected, found = (of_lanes(f, **case)(*inputs) for f in ("xla", "tpu"))
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
    jax.tree.map(close, found, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
def test_a_lane_that_overflows_is_alone_in_that(bad):
    """Its own gradients are not finite where they are not in front."""
    params, x, labels = arrays()
    spoiled = jax.tree.map(lambda x: x.at[1].set(bad), params)
    run = of_lanes("tpu")
    _, expected = run(params, x, labels)
    _, found = run(spoiled, x, labels)
    others = np.delete(np.arange(LANES), 1)
    same = lambda a, b: np.testing.assert_array_equal(a[others], b[others])
    jax.tree.map(same, found, expected)
    _, in_front = of_lanes("xla")(spoiled, x, labels)
    is_bad = lambda x: not np.isfinite(x[1]).all()
    assert any(map(is_bad, jax.tree.leaves(in_front)))
    assert any(map(is_bad, jax.tree.leaves(found)))


@pytest.mark.parametrize("at", ["kernels", "images"])
def test_a_squashed_lane_with_a_number_that_is_not_finite_has_no_finite_loss(at):
    def loss(kernels, x):
        for kernel in kernels:
            numbers = ("NHWC", "HWIO", "NHWC")
            x = jnp.tanh(
                lax.conv_general_dilated(
                    x, kernel, (1, 1), "SAME", dimension_numbers=numbers
                )
            )
        return x.mean(), ()

    kernels, x = [jnp.ones((LANES, 3, 3, 8, 8))] * 2, jnp.ones((LANES, 2, 6, 6, 8))
    spoil = lambda x: x.at[1, 1, 1, 1, 1].set(jnp.nan)
    kernels = [spoil(kernels[0]), kernels[1]] if at == "kernels" else kernels
    x = spoil(x) if at == "images" else x
    with use_forms("tpu"):
        (losses, _), _ = jax.vmap(
            lambda kernels, x: value_and_grad(lambda k: loss(k, x))(kernels)
        )(kernels, x)
    assert np.flatnonzero(~np.isfinite(losses)).tolist() == [1]


def test_narrow_convolutions_of_a_group_are_single_ones():
    count = lambda forms: str(jax.make_jaxpr(of_lanes(forms))(*arrays())).count(
        f"feature_group_count={LANES}"
    )
    assert count("tpu") == 0 < count("xla")


def test_a_network_that_mixes_channels_everywhere_keeps_its_lanes_in_front():
    def loss(kernels, x):
        for kernel in kernels:
            numbers = ("NHWC", "HWIO", "NHWC")
            y = lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=numbers
            )
            x = nn.softmax(y) if mixes else jnp.tanh(y)
        return x.mean(), ()

    def groups():
        with use_forms("tpu"):
            run = jax.vmap(value_and_grad(lambda k: loss(k, jnp.ones((2, 6, 6, 8)))))
            program = jax.make_jaxpr(run)([jnp.ones((LANES, 3, 3, 8, 8))] * 3)
        return f"feature_group_count={LANES}" in str(program)

    mixes = True
    assert groups()
    mixes = False
    assert not groups()


def test_steps_in_a_loop_train_lanes_alike():
    params, x, labels = arrays()

    def train(forms):
        def client(params, x, labels):
            def step(_, params):
                _, grads = gradients(1, jnp.float32(1), params, x, labels)
                return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

            return lax.fori_loop(0, 3, step, params)

        def run(params, x, labels):
            with use_forms(forms):
                return jax.vmap(client, (None, 0, 0))(params, x, labels)

        return jax.jit(run)(jax.tree.map(lambda x: x[0], params), x, labels)

    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
    jax.tree.map(close, train("tpu"), train("xla"))
