"""A rewritten function is the same function, whatever its operations stand within."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fedfr_jax.convolutions import fast

RNG = np.random.default_rng(0)
# Large enough for Winograd's algorithm, which has constants, and no transpose.
X = jnp.float32(RNG.normal(size=(8, 6, 5, 8)))
KERNEL = jnp.float32(RNG.normal(size=(3, 3, 8, 8)) / 9)


def conv(x, kernel):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=numbers
    )


def layer(x, kernel):
    return jnp.tanh(conv(x, kernel))


def scanned(x, kernel):
    step = lambda x, scale: (layer(x, scale * kernel), x.mean())
    return lax.scan(step, x, jnp.arange(3.0))[0]


def looped(x, kernel):
    return lax.fori_loop(0, 3, lambda _, x: layer(x, kernel), x)


def branched(x, kernel):
    return lax.cond(x.sum() > 0, lambda: x, lambda: layer(x, kernel))


def switched(x, kernel):
    ways = [lambda: x, lambda: layer(x, kernel), lambda: 2 * layer(x, kernel)]
    return lax.switch(jnp.int32(2), ways)


def recomputed(x, kernel):
    return jax.checkpoint(layer)(x, kernel)


def with_policy(x, kernel):
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    run = lambda x, kernel: jnp.sin(checkpoint_name(layer(x, kernel), "kept"))
    return jax.checkpoint(run, policy=policy)(x, kernel)


@jax.custom_vjp
def _doubled(x, kernel):
    return conv(x, kernel)


def _doubled_backward(saved, dy):
    return tuple(2 * x for x in jax.vjp(conv, *saved)[1](dy))


_doubled.defvjp(lambda *arrays: (conv(*arrays), arrays), _doubled_backward)


def with_derivative(x, kernel):
    return _doubled(jnp.sin(x), kernel)


@jax.custom_jvp
def _tripled(x, kernel):
    return conv(x, kernel)


@_tripled.defjvp
def _tripled_tangent(primals, tangents):
    (x, kernel), (dx, dkernel) = primals, tangents
    return _tripled(x, kernel), 3 * conv(dx, kernel) + conv(x, dkernel)


def with_tangent(x, kernel):
    return _tripled(jnp.sin(x), kernel)


def counted(x, kernel):
    """A custom derivative with an integer argument, within a scan."""

    @jax.custom_vjp
    def run(count, x, kernel):
        return conv(x, kernel) * count.astype(x.dtype)

    def backward(saved, dy):
        return None, *(5 * x for x in jax.vjp(conv, *saved)[1](dy))

    run.defvjp(lambda count, *a: (run(count, *a), a), backward)
    step = lambda x, i: (run(i, x, kernel), None)
    return lax.scan(step, x, jnp.arange(1, 3))[0]


def mapped(x, kernel):
    kernels = jnp.stack([kernel, 2 * kernel])
    return jax.vmap(layer, (None, 0))(x, kernels)


def by_clients(check, x, kernel):
    mesh = jax.make_mesh((2,), ("clients",), axis_types=(AxisType.Auto,))

    def device(x, kernel):
        return lax.psum(scanned(x, kernel), "clients")

    specs = {"in_specs": (P("clients"), P()), "out_specs": P(), "check_vma": check}
    return jax.shard_map(device, mesh=mesh, **specs)(x, kernel)


def within_jit(x, kernel):
    return jax.jit(layer)(x, kernel) + jax.jit(layer)(2 * x, kernel)


WAYS = {
    "jit": within_jit,
    "scan": scanned,
    "fori_loop": looped,
    "cond": branched,
    "switch": switched,
    "remat": recomputed,
    "policy": with_policy,
    "custom_vjp": with_derivative,
    "custom_jvp": with_tangent,
    "integers": counted,
    "vmap": mapped,
    "shard_map": functools.partial(by_clients, False),
    "checked shard_map": functools.partial(by_clients, True),
}


def gradients(function):
    return jax.value_and_grad(lambda *a: (function(*a) ** 2).sum(), argnums=(0, 1))


@pytest.mark.parametrize("name", WAYS)
def test_values_and_gradients_are_the_functions_and_no_convolution_is_left(name):
    function = WAYS[name]
    ways = {
        "as it is": gradients(function),
        "rewritten, then differentiated": gradients(fast(function)),
        "differentiated, then rewritten": fast(gradients(function)),
    }
    found = {}
    for way, run in ways.items():
        program = jax.jit(run).trace(X, KERNEL)
        is_left = "conv_general_dilated" in str(program.jaxpr)
        stays = name == "custom_jvp" and way == "rewritten, then differentiated"
        assert is_left == (way == "as it is" or stays), way
        found[way] = program.lower().compile()(X, KERNEL)
    want = found.pop("as it is")
    for got in found.values():
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)
        jax.tree.map(close, got, want)


@pytest.mark.parametrize("function", [scanned, with_derivative])
def test_a_batch_of_clients_is_that_of_each(function):
    xs, kernels = jnp.stack([X, X + 1]), jnp.stack([KERNEL, -KERNEL])
    run = gradients(fast(function))
    got = jax.jit(jax.vmap(run))(xs, kernels)
    want = [jax.jit(run)(*pair) for pair in zip(xs, kernels, strict=True)]
    want = jax.tree.map(lambda *x: jnp.stack(x), *want)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, got, want)


def test_a_function_without_these_operations_comes_out_as_it_was():
    def perceptron(weights, x, name="", scale=2.0):
        assert name == "hidden"
        hidden = jax.nn.relu(jnp.dot(x, weights["w"]) * scale)
        return {"y": lax.map(jnp.sin, hidden), "nothing": None}, jax.random.split(key)

    key, arguments = jax.random.key(0), ({"w": jnp.ones((4, 3))}, jnp.ones((2, 4)))
    text = lambda f: jax.jit(lambda *a: f(*a, name="hidden")).lower(*arguments)
    assert text(fast(perceptron)).as_text() == text(perceptron).as_text()
    got = fast(perceptron)(*arguments, name="hidden")
    want = perceptron(*arguments, name="hidden")
    assert jax.tree.structure(got) == jax.tree.structure(want)


def test_scopes_are_named_in_profiles_as_before():
    def network(x, kernel):
        with jax.named_scope("stem"):
            return conv(x, kernel)

    text = jax.jit(fast(network)).lower(X, KERNEL).as_text(debug_info=True)
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert any("stem" in line for line in products if line.startswith("#loc"))


def test_what_is_closed_over_has_its_gradient():
    def loss(kernel):
        return (fast(lambda x: layer(x, kernel))(X) ** 2).sum()

    want = jax.grad(lambda kernel: (layer(X, kernel) ** 2).sum())(KERNEL)
    np.testing.assert_allclose(jax.grad(loss)(KERNEL), want, rtol=1e-4, atol=1e-4)
