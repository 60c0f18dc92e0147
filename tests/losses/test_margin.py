"""Margins and cross entropy against saved outputs, hand-worked cases and padding."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from fedfr_jax.losses import LOSSES, contract
from fedfr_jax.losses.contract import margin_inputs
from fedfr_jax.losses.margin import (
    cosine,
    interclass_filter,
    normalize,
    repeat_others,
    softmax_cross_entropy,
)

PROPERTY = settings(max_examples=15, deadline=None, derandomize=True, database=None)
# Compiled whole: tracing one operation at a time is what would make these tests slow.
PLAIN = ("arcface", "arcface_straight_through", "cosface")


def logits_of(name):
    """(cosine, labels, scale and margin) -> logits, of a member of LOSSES."""

    def logits(cosines, labels, **settings):
        margin = LOSSES[name](**settings)
        seen = margin_inputs(cosines, cosines, labels)
        return contract.logits(margin, cosines, labels, seen, {})

    return logits


arcface, arcface_straight_through, cosface = map(logits_of, PLAIN)
MARGINS = {
    name: jax.jit(logits_of(name), static_argnames=("scale", "margin"))
    for name in PLAIN
}
entropy = jax.jit(softmax_cross_entropy)


def assert_close(actual, expected, relative):
    """Close relative to the largest entry: small entries carry its rounding."""
    largest = np.abs(expected).max()
    assert_allclose(actual, expected, rtol=relative, atol=relative * largest)


def mean_loss(features, weights, labels, to_logits):
    logits = to_logits(cosine(features, weights), labels)
    return entropy(logits, labels).mean()


def value_and_gradients(arrays, labels, to_logits, dtype):
    features, weights = (a.astype(dtype) for a in arrays)
    labels = np.int32(labels)
    grad = jax.value_and_grad(mean_loss, argnums=(0, 1))
    return jax.jit(grad, static_argnums=3)(features, weights, labels, to_logits)


def example(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    features, weights = rng.normal(size=(6, 5)), rng.normal(size=(7, 5))
    labels = rng.integers(0, 7, 6).astype(np.int32)
    return features.astype(dtype), weights.astype(dtype), labels


@pytest.mark.parametrize("dtype, relative", [("float64", 1e-10), ("float32", 1e-5)])
def test_cosface_matches_the_official_loss_and_gradients(golden, dtype, relative):
    want = golden("fedfr_cosface")
    labels = np.int32(want["labels"])

    @jax.jit
    def run(features, weights):
        cosines = cosine(features, weights)
        logits = cosface(cosines, labels, scale=30.0)
        sharp = mean_loss(features, weights, labels, cosface)
        return cosines, logits, softmax_cross_entropy(logits, labels), sharp

    with jax.enable_x64(dtype == "float64"):
        loss, (by_features, by_weights) = value_and_gradients(
            (want["features"], want["weight"]),
            labels,
            lambda c, y: cosface(c, y, scale=30.0, margin=0.4),
            dtype,
        )
        given = (want[k].astype(dtype) for k in ("features", "weight"))
        cosines, logits, losses, sharp = run(*given)
    assert_close(cosines, want["cosine"], relative)
    assert_close(logits, want["logits"], relative)
    assert_close(losses, want["per_sample_loss"], relative)
    assert_close(sharp, want["loss_s64"], relative)
    assert_close(loss, want["loss"], relative)
    assert_close(by_features, want["grad_features"], relative)
    assert_close(by_weights, want["grad_weight"], relative)


GOLDEN_MARGINS = {
    "cosface_m04": lambda c, y: cosface(c, y, scale=64.0, margin=0.4),
    "arcface_m05": lambda c, y: arcface_straight_through(c, y, scale=64.0, margin=0.5),
    "cosface_m04_filter": lambda c, y: cosface(
        interclass_filter(c, y, threshold=0.3), y, scale=64.0, margin=0.4
    ),
}


@pytest.mark.parametrize("name", GOLDEN_MARGINS)
def test_logits_and_their_slope_match_insightface(golden, name):
    want, to_logits = golden("bigface_margin"), GOLDEN_MARGINS[name]
    labels, cosines = np.int32(want["labels"]), want["cos"].astype("float32")

    @jax.jit
    def run(cosines):
        found, pull = jax.vjp(lambda c: to_logits(c, labels), cosines)
        return found, *pull(jnp.ones_like(found))

    assert_close(run(cosines)[0], want[f"{name}/logits"], 1e-6)
    shrunk, slope = run(np.float32(0.9) * cosines)
    assert_close(shrunk, want[f"{name}/logits_at_0.9cos"], 1e-6)
    assert_array_equal(slope, want[f"{name}/dlogit_dcos_lib"])


@pytest.mark.parametrize("name", GOLDEN_MARGINS)
@pytest.mark.parametrize("dtype, relative", [("float64", 1e-10), ("float32", 1e-5)])
def test_margin_losses_match_the_dense_reference(golden, name, dtype, relative):
    want = golden("bigface_margin")
    if name == "arcface_m05":
        # Rows 0 and 1 have cosine +-1, where the angle, and so the logit, carries the
        # square root of the rounding. The other rows are compared exactly below.
        relative = {"float64": 1e-8, "float32": 1e-4}[dtype]
    with jax.enable_x64(dtype == "float64"):
        loss, (by_x, by_w) = value_and_gradients(
            (want["x"], want["w"]), want["labels"], GOLDEN_MARGINS[name], dtype
        )
    assert_close(loss, want[f"{name}/dense64/loss"], relative)
    assert_close(by_x, want[f"{name}/dense64/dx"], relative)
    assert_close(by_w, want[f"{name}/dense64/dw"], relative)


@pytest.mark.parametrize(
    "to_logits, name",
    [
        (arcface, "arcface_exact_rows2_7"),
        (arcface_straight_through, "arcface_straightthrough_rows2_7"),
    ],
)
@pytest.mark.parametrize("dtype, relative", [("float64", 1e-10), ("float32", 1e-5)])
def test_both_arcface_gradients_match_their_reference(
    golden, to_logits, name, dtype, relative
):
    want = golden("bigface_margin")
    arrays, labels = (want["x"][2:], want["w"]), want["labels"][2:]
    with jax.enable_x64(dtype == "float64"):
        loss, (by_x, by_w) = value_and_gradients(arrays, labels, to_logits, dtype)
    assert_close(loss, want[f"{name}/loss"], relative)
    assert_close(by_x, want[f"{name}/dx"], relative)
    assert_close(by_w, want[f"{name}/dw"], relative)


def test_interclass_filter_spares_the_label_and_the_threshold_itself():
    cosines = np.float32([[0.9, 0.5, 0.6, -0.7]])
    filtered = jax.jit(partial(interclass_filter, threshold=0.5))
    kept = filtered(cosines, np.int32([0]))
    assert_allclose(kept, [[0.9, 0.5, 0.0, -0.7]])


@pytest.mark.parametrize("name", MARGINS)
def test_a_label_outside_the_classes_moves_no_logit(name):
    cosines = np.float32([[0.3, -0.2], [0.1, 0.9]])
    logits = MARGINS[name](cosines, np.int32([2, -1]), scale=3.0, margin=0.4)
    assert_allclose(logits, 3.0 * cosines, rtol=1e-6)


@pytest.mark.parametrize("name", MARGINS)
def test_padding_classes_changes_no_value_and_gets_no_gradient(name):
    @jax.jit
    def run(features, weights, labels, class_mask):
        def loss(features, weights):
            logits = MARGINS[name](cosine(features, weights), labels, margin=0.4)
            return entropy(logits, labels, class_mask).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(features, weights)

    @PROPERTY
    @given(st.integers(0, 2**16), st.integers(0, 7), st.booleans())
    def check(seed, first, is_zero):
        features, weights, labels = example(seed)
        loss, (by_features, by_weights) = run(
            features, weights, labels, np.ones(7, bool)
        )
        filler = np.zeros((3, 5)) if is_zero else np.full((3, 5), 2.0)
        padded = np.insert(weights, [first] * 3, filler.astype(np.float32), axis=0)
        is_real = np.insert(np.ones(7, bool), [first] * 3, False)
        moved = np.where(labels >= first, labels + 3, labels).astype(np.int32)
        loss_2, (by_features_2, by_padded) = run(features, padded, moved, is_real)
        assert_allclose(loss_2, loss, rtol=1e-5)
        assert_close(by_features_2, by_features, 1e-4)
        assert_close(by_padded[is_real], by_weights, 1e-4)
        assert_array_equal(by_padded[~is_real], 0)

    check()


@pytest.mark.parametrize("length", [1e36, 1e30, 1e20, 1.0, 1e-6])
def test_a_direction_is_that_of_any_length_that_the_type_holds(length):
    # Untrained residual networks without statistics reach 1e26, whose square does not.
    direction = np.float32([[1.0, -2.0, 2.0], [0.0, 0.6, 0.8]])
    x = jnp.asarray(direction * np.float32(length))
    unit = direction / np.linalg.norm(direction, axis=1, keepdims=True)
    assert_allclose(jax.jit(normalize)(x), unit, rtol=1e-6)
    slope = jax.jit(jax.jacobian(normalize))(x[0])
    expected = np.eye(3) - np.outer(unit[0], unit[0])
    length = np.linalg.norm(np.float64(x[0]))
    assert_allclose(np.float64(slope) * length, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_longest_and_the_zero_vector_have_finite_directions_and_slopes(dtype):
    with jax.enable_x64(dtype == "float64"):
        most = float(jnp.finfo(dtype).max)
        x = jnp.asarray([[most, -most], [most, 0.0], [0.0, 0.0]], dtype)
        eps = {"float16": 1e-2}.get(dtype, 1e-12)
        unit = jax.jit(lambda x: normalize(x, eps=eps))
        root = 0.5**0.5
        actual = np.asarray(unit(x), np.float64)
        assert_allclose(actual, [[root, -root], [1, 0], [0, 0]], atol=4e-3)
        slope = jax.jit(jax.grad(lambda x: unit(x).sum()))(x)
        assert np.isfinite(np.asarray(slope, np.float64)).all()


def test_repeated_others_are_the_same_as_appended_copies():
    logits = np.random.default_rng(0).standard_normal((3, 6), "float32")
    labels, number, times = np.int32([0, 2, 5]), 2, 7
    class_mask = np.array([True, True, False, True, True, True])
    # The first two of each row that are neither the label nor masked.
    first = np.array([[1, 3], [0, 1], [0, 1]])

    def appended(logits):
        own = jnp.where(class_mask[None], logits, -jnp.inf)
        copies = jnp.tile(jnp.take_along_axis(logits, first, 1), (1, times))
        every = jnp.concatenate([own, copies], axis=1)
        picked = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
        return (jax.nn.logsumexp(every, axis=1) - picked)[jnp.array([0, 2])]

    def repeated(logits):
        more = repeat_others(logits, labels, number, times, class_mask)
        return entropy(more, labels, class_mask)[jnp.array([0, 2])]

    @jax.jit
    def run(logits):
        (found, pull), (wanted, pull_2) = (
            jax.vjp(f, logits) for f in (repeated, appended)
        )
        ones = jnp.ones_like(found)
        return (found, wanted), (pull(ones)[0], pull_2(ones)[0])

    values, slopes = run(logits)
    assert_allclose(*values, rtol=1e-6)
    assert_allclose(*slopes, rtol=1e-5, atol=1e-7)


def test_cross_entropy_without_any_class_or_label_has_no_nan():
    @jax.jit
    @jax.value_and_grad
    def run(logits, class_mask):
        return entropy(logits, np.int32([0, -1, 9]), class_mask).sum()

    for mask in (np.zeros(4, bool), np.array([False, True, True, True])):
        value, gradient = run(np.ones((3, 4), np.float32), mask)
        assert np.isfinite(value) and np.isfinite(gradient).all()
