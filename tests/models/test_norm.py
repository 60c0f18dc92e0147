"""Batch normalization by hand, and its edges."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.models import norm
from fedfr_jax.models.norm import (
    NO_GROUP,
    BatchNorm,
    GroupNorm,
    StatsGroup,
    in_one_pass,
    in_one_pass_of_narrow,
    in_two_passes,
    moved,
    normalize,
    prelu,
)

X = np.float32([[1, 10], [2, 10], [3, 10], [6, 10]])  # means 3, 10


def _train(module, x):
    @jax.jit
    def run(x):
        variables = module.init(jax.random.key(0), x, train=False)
        y, updated = module.apply(variables, x, train=True, mutable=["batch_stats"])
        return y, moved(variables["batch_stats"], updated["batch_stats"]), variables

    return jax.device_get(run(x))


def test_running_variance_takes_the_unbiased_variance_and_the_batch_the_biased_one():
    y, stats, _ = _train(BatchNorm(), X)
    biased = (4 + 1 + 0 + 9) / 4
    np.testing.assert_allclose(y[:, 0], (X[:, 0] - 3) / np.sqrt(biased + 1e-5), 1e-5)
    np.testing.assert_allclose(stats["mean"], [0.3, 1.0], rtol=1e-6)
    np.testing.assert_allclose(stats["var"], [0.9 + 0.1 * 14 / 3, 0.9], rtol=1e-6)


def test_a_constant_channel_gives_zero_and_finite_gradients():
    module = BatchNorm()
    y, _, variables = _train(module, X)
    np.testing.assert_array_equal(y[:, 1], 0)
    loss = lambda x: jnp.sum(
        module.apply(variables, x, train=True, mutable=["batch_stats"])[0] ** 3
    )
    assert np.all(np.isfinite(jax.jit(jax.grad(loss))(X)))


def test_statistics_of_half_precision_inputs_are_float32():
    # bfloat16 cannot tell 1000 from 1001: its own sums would lose the variance.
    x = (1000 + 8 * np.arange(8.0)).astype(jnp.bfloat16).reshape(8, 1)
    y, stats, _ = _train(BatchNorm(), x)
    assert y.dtype == jnp.bfloat16 and stats["var"].dtype == jnp.float32
    want = np.var(np.asarray(x, np.float32), ddof=1)
    np.testing.assert_allclose(stats["var"], [0.9 + 0.1 * want], rtol=1e-5)


def test_the_gradient_is_that_of_the_formula():
    def formula(z, scale, bias):
        mean = z.mean((0, 1, 2), keepdims=True)
        var = ((z - mean) ** 2).mean((0, 1, 2), keepdims=True)
        shape = (1, 1, 1, -1)
        unit = (z - mean) / jnp.sqrt(var + 1e-5)
        return unit * scale.reshape(shape) + bias.reshape(shape)

    with jax.enable_x64(True):
        normal = np.random.default_rng(0).normal
        z, pull = normal(3, size=(4, 3, 2, 5)), normal(size=(4, 3, 2, 5))
        scale, bias = normal(size=(2, 5))
        total = lambda f: lambda *args: (pull * f(*args)).sum()
        own = total(lambda *args: normalize(*args, 1e-5)[0])
        got = jax.jit(jax.grad(own, (0, 1, 2)))(z, scale, bias)
        want = jax.jit(jax.grad(total(formula), (0, 1, 2)))(z, scale, bias)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_moments_of_one_pass_are_those_of_two_far_from_zero_too():
    z = 1000 + np.random.default_rng(0).standard_normal((64, 8, 8, 3), "float32")
    mean, var, centered = jax.jit(lambda z: in_one_pass(z, NO_GROUP))(z)
    exact = np.asarray(z, np.float64)
    np.testing.assert_allclose(mean, exact.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(var, exact.var((0, 1, 2)), rtol=1e-4)
    np.testing.assert_allclose(
        centered, exact - np.asarray(mean)[None, None, None], atol=1e-4
    )
    over = StatsGroup(2, lambda x: jax.lax.pmean(x, "parts"))
    parts = z.reshape(2, 32, 8, 8, 3)
    of_parts = jax.vmap(lambda z: in_one_pass(z, over)[:2], axis_name="parts")
    found = jax.jit(of_parts)(parts)
    np.testing.assert_allclose(found[0][1], mean, rtol=1e-6)
    np.testing.assert_allclose(found[1][0], var, rtol=1e-3)


def test_moments_of_narrow_numbers_are_those_of_two_passes():
    normal = np.random.default_rng(0).standard_normal((64, 8, 8, 3), "float32")
    x = jnp.asarray(100 + normal, jnp.bfloat16)
    z = x.astype(jnp.float32)
    found = jax.jit(lambda z: in_one_pass_of_narrow(z, NO_GROUP))(z)
    wanted = jax.jit(lambda z: in_two_passes(z, NO_GROUP))(z)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-3, atol=1e-4)
    constant = jnp.full((4, 3), 3e4, jnp.bfloat16).astype(jnp.float32)
    assert (in_one_pass_of_narrow(constant, NO_GROUP)[1] >= 0).all()
    over = StatsGroup(2, lambda x: jax.lax.pmean(x, "parts"))
    of_parts = jax.vmap(lambda z: in_one_pass_of_narrow(z, over)[:2], axis_name="parts")
    shifted = z.reshape(2, 32, 8, 8, 3).at[1].add(3.0)
    both = jax.jit(of_parts)(shifted)[1]
    np.testing.assert_allclose(both[0], shifted.var((0, 1, 2, 3)), rtol=5e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_tpu_adds_up_narrow_numbers_in_one_pass(monkeypatch, dtype):
    x = jnp.ones((4, 3), dtype)
    asked = []

    def spy(z, pool):
        asked.append(z.dtype)
        return in_two_passes(z, pool)

    monkeypatch.setattr(norm, "platform", lambda: "tpu")
    monkeypatch.setattr(norm, "in_one_pass_of_narrow", spy)
    y = norm.normalize_batch(x, jnp.ones(3), jnp.zeros(3), 1e-5)[0]
    assert y.dtype == jnp.float32
    assert bool(asked) == (dtype == "bfloat16")


def test_the_gradient_of_prelu_is_that_of_each_of_its_operations():
    x, dy = np.random.default_rng(0).standard_normal((2, 3, 4, 5), "float32")
    slope = np.linspace(-0.5, 0.5, 5, dtype="float32")
    plain = lambda x, slope: jnp.where(x > 0, x, slope[None, None] * x)

    @jax.jit
    def pulled(*given):
        return [jax.vjp(f, *given)[1](dy) for f in (prelu, plain)]

    chex.assert_trees_all_close(*pulled(x, slope), rtol=1e-5)


def _grouped(x, groups):
    """Every image and group by itself."""
    y = np.empty_like(x)
    size = x.shape[-1] // groups
    for i in range(len(x)):
        for start in range(0, x.shape[-1], size):
            part = x[i, ..., start : start + size]
            unit = (part - part.mean()) / np.sqrt(part.var() + 1e-5)
            y[i, ..., start : start + size] = unit
    return y


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_group_norm_is_that_of_every_image_and_group(groups):
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, (2, 4, 5, 6)).astype(np.float32)
    params = {"scale": rng.normal(size=6), "bias": rng.normal(size=6)}
    params = {name: x.astype(np.float32) for name, x in params.items()}
    apply = jax.jit(lambda *given: GroupNorm(groups).apply(*given, train=True))
    got = apply({"params": params}, x)
    want = _grouped(x, groups) * params["scale"] + params["bias"]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
