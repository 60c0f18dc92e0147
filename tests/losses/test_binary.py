"""The binary branch and its converters against saved outputs, limits and padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from fedfr_jax.losses import binary
from fedfr_jax.losses.binary import CONVERTERS

binary_branch = jax.jit(binary.binary_branch, static_argnames="t")
PROPERTY = settings(max_examples=15, deadline=None, derandomize=True, database=None)


def assert_close(actual, expected, tolerance, relative=0.0):
    atol = tolerance + relative * np.abs(expected).max()
    assert_allclose(actual, expected, rtol=relative, atol=atol)


def branch_params(want, prefix, converter, dtype):
    arrays = {
        "converter": converter,
        "features": want["features"],
        "weight": want[f"{prefix}weight"],
        "bias": want[f"{prefix}bias"],
    }
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), arrays)


@functools.partial(jax.jit, static_argnums=2)
def mean_loss(params, labels, converter):
    converted = CONVERTERS[converter].apply(params["converter"], params["features"])
    losses = binary_branch(converted, params["weight"], params["bias"], labels)
    return losses.mean(), converted


VALUE_AND_GRAD = jax.jit(jax.value_and_grad(mean_loss, has_aux=True), static_argnums=2)


def torch_bottleneck(want):
    """The four branches' separate torch layers as our stacked kernels."""

    def stack(name, transpose):
        branches = [want[f"bottle_br{i}.{name}"] for i in (1, 2, 3, 4)]
        return np.stack([b.T if transpose else b for b in branches])

    return {
        "reduce": {"kernel": stack("0.weight", True), "bias": stack("0.bias", False)},
        "mix": {"kernel": stack("2.weight", True), "bias": stack("2.bias", False)},
        "join": {
            "kernel": want["bottle_concat_fc.weight"].T,
            "bias": want["bottle_concat_fc.bias"],
        },
    }


# The official code adds 1e-8 inside its logarithm, hence 5e-10 and not 1e-10.
TOLERANCES = [("float64", 5e-10, 0.0), ("float32", 5e-10, 1e-5)]


@pytest.mark.parametrize("prefix", ["ident_", "rand_"])
@pytest.mark.parametrize("dtype, tolerance, relative", TOLERANCES)
def test_linear_branch_matches_the_official_loss_and_gradients(
    golden, prefix, dtype, tolerance, relative
):
    want = golden("fedfr_bce_branch")
    converter = {
        "kernel": want[f"{prefix}converter_weight"].T,
        "bias": want[f"{prefix}converter_bias"],
    }
    with jax.enable_x64(dtype == "float64"):
        params = branch_params(want, prefix, converter, dtype)
        labels = jnp.asarray(want["labels"], jnp.int32)
        (loss, converted), grads = VALUE_AND_GRAD(params, labels, "linear")
    exact = relative or 1e-12
    assert_close(converted, want[f"{prefix}branch_features"], 0, exact)
    assert_close(loss, want[f"{prefix}loss_softplus"], 0, exact)
    assert_close(loss, want[f"{prefix}loss"], tolerance, relative)
    for ours, theirs in (
        (grads["features"], "features"),
        (grads["converter"]["kernel"].T, "converter_weight"),
        (grads["converter"]["bias"], "converter_bias"),
        (grads["weight"], "weight"),
        (grads["bias"], "bias"),
    ):
        assert_close(ours, want[f"{prefix}grad_{theirs}"], tolerance, relative)


@pytest.mark.parametrize("dtype, tolerance, relative", TOLERANCES)
def test_bottleneck_branch_matches_the_official_loss_and_gradient(
    golden, dtype, tolerance, relative
):
    want = golden("fedfr_bce_branch")
    with jax.enable_x64(dtype == "float64"):
        params = branch_params(want, "ident_", torch_bottleneck(want), dtype)
        labels = jnp.asarray(want["labels"], jnp.int32)
        (loss, converted), grads = VALUE_AND_GRAD(params, labels, "bottleneck")
    assert_close(converted, want["bottle_branch_features"], 0, relative or 1e-12)
    assert_close(loss, want["bottle_loss"], tolerance, relative)
    assert_close(grads["features"], want["bottle_grad_features"], tolerance, relative)


def test_bottleneck_converter_starts_uniform_within_the_inverse_root_of_its_inputs():
    init = jax.jit(CONVERTERS["bottleneck"].init, static_argnums=1)
    params = init(jax.random.key(0), 64)
    for name, num_inputs in (("reduce", 64), ("mix", 16), ("join", 64)):
        kernel, limit = np.abs(params[name]["kernel"]), num_inputs**-0.5
        assert 0.98 * limit < kernel.max() <= limit
        assert_allclose(kernel.mean(), limit / 2, rtol=0.05)


def test_public_labels_make_every_class_a_negative():
    features, weights, bias, _ = example(0)
    losses = binary_branch(features, weights, bias, np.full(6, 5, np.int32))
    for label in (-1, 6, 5000):
        other = binary_branch(features, weights, bias, np.full(6, label, np.int32))
        assert_array_equal(other, losses)
    own = binary_branch(features, weights, bias, np.zeros(6, np.int32))
    assert np.all(np.asarray(own) != np.asarray(losses))


def example(seed):
    rng = np.random.default_rng(seed)
    features, weights = rng.normal(size=(6, 4)), rng.normal(size=(5, 4))
    labels = rng.integers(0, 7, 6).astype(np.int32)
    bias = rng.normal(size=5)
    arrays = (x.astype(np.float32) for x in (features, weights, bias))
    return *arrays, labels


@jax.jit
def masked_loss_and_gradients(features, weights, bias, labels, class_mask):
    def loss(features, weights, bias):
        return binary_branch(features, weights, bias, labels, class_mask).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(features, weights, bias)


@PROPERTY
@given(st.integers(0, 2**16), st.booleans())
def test_padding_classes_changes_no_value_and_gets_no_gradient(seed, is_zero):
    features, weights, bias, labels = example(seed)
    everything = np.ones(5, bool)
    loss, grads = masked_loss_and_gradients(features, weights, bias, labels, everything)
    filler = np.zeros((3, 4)) if is_zero else np.full((3, 4), 9.0)
    padded = np.concatenate([weights, filler]).astype(np.float32)
    padded_bias = np.append(bias, [1e30, -1e30, 0]).astype(np.float32)
    # Public labels 5 and 6 now meet padded classes, and stay public.
    loss_2, grads_2 = masked_loss_and_gradients(
        features, padded, padded_bias, labels, np.arange(8) < 5
    )
    assert_allclose(loss_2, loss, rtol=1e-5)
    assert_close(grads_2[0], grads[0], 1e-9, 1e-5)
    for ours, theirs in zip(grads_2[1:], grads[1:], strict=True):
        assert_close(ours[:5], theirs, 1e-9, 1e-5)
        assert_array_equal(ours[5:], 0)


@pytest.mark.parametrize("t", [1.0, 1.5, 2.0, 3.0, 3])
def test_float32_is_finite_at_zero_vectors_and_at_cosine_one(t):
    weights = np.array([[3, 4, 0.1], [0, 0, 0], [1, 2, 2], [0.1, 0.7, 0.3]], np.float32)
    features = np.concatenate([weights, -weights, 1e-15 * weights])
    labels = np.tile(np.arange(4, dtype=np.int32), 3)

    def loss(features, weights):
        return binary_branch(features, weights, jnp.zeros(4), labels, t=t).sum()

    value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(features, weights)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads)
