"""Spreading classes against saved outputs, hand-worked cases and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from fedfr_jax.losses import spreadout as module

# Compiled whole: tracing one operation at a time is what would make these tests slow.
spread = jax.jit(module.spread, static_argnames="steps")
spreadout = jax.jit(module.spreadout)
spreadout_sum = jax.jit(module.spreadout_sum)
value_and_grad = jax.jit(jax.value_and_grad(module.spreadout))


@pytest.mark.parametrize("dtype, relative", [("float64", 1e-10), ("float32", 1e-5)])
@pytest.mark.parametrize("loss, mode", [(spreadout, "mean"), (spreadout_sum, "sum")])
def test_value_and_gradient_match_the_official_penalty(
    golden, loss, mode, dtype, relative
):
    want = golden("fedfr_spreadout")
    with jax.enable_x64(dtype == "float64"):
        value, gradient = jax.jit(jax.value_and_grad(loss))(
            jnp.asarray(want["weight"], dtype)
        )
    assert_allclose(value, want[f"loss_{mode}"], rtol=relative)
    atol = relative * np.abs(want[f"grad_{mode}"]).max()
    assert_allclose(gradient, want[f"grad_{mode}"], rtol=relative, atol=atol)


@pytest.mark.parametrize("dtype, relative", [("float64", 1e-10), ("float32", 1e-5)])
def test_twenty_server_steps_match_the_official_optimizer(golden, dtype, relative):
    want = golden("fedfr_spreadout")
    with jax.enable_x64(dtype == "float64"):
        weights, losses = spread(jnp.asarray(want["weight"], dtype))
    assert_allclose(losses, want["loss_history_20"], rtol=relative)
    atol = relative * np.abs(want["weight_after_20"]).max()
    assert_allclose(weights, want["weight_after_20"], rtol=relative, atol=atol)


@pytest.mark.parametrize("filler", [0.0, 1.0])
def test_padding_classes_changes_nothing_and_is_returned_as_it_came(golden, filler):
    weights = golden("fedfr_spreadout")["weight"].astype(np.float32)
    padded = np.insert(weights, [0, 4, 10], np.float32(filler), axis=0)
    is_real = np.insert(np.ones(10, bool), [0, 4, 10], False)
    loss, gradient = value_and_grad(weights)
    loss_2, gradient_2 = value_and_grad(padded, class_mask=is_real)
    assert_allclose(loss_2, loss, rtol=1e-6)
    assert_allclose(gradient_2[is_real], gradient, rtol=1e-4, atol=1e-7)
    assert_array_equal(gradient_2[~is_real], 0)
    moved, _ = spread(weights)
    moved_2, _ = spread(padded, class_mask=is_real)
    assert_allclose(moved_2[is_real], moved, rtol=1e-5, atol=1e-7)
    assert_array_equal(moved_2[~is_real], padded[~is_real])
