"""The model-contrastive loss against the saved outputs of FedFR and MOON."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from fedfr_jax.losses import contrastive

model_contrastive = jax.jit(contrastive.model_contrastive)


@jax.jit
def mean_loss(features, global_features, previous_features):
    return model_contrastive(features, global_features, previous_features).mean()


VALUE_AND_GRAD = jax.jit(jax.value_and_grad(mean_loss))


@pytest.mark.parametrize("dtype, relative", [("float64", 1e-10), ("float32", 1e-5)])
def test_value_and_gradient_match_the_official_fedfr(golden, dtype, relative):
    want = golden("fedfr_contrastive")
    with jax.enable_x64(dtype == "float64"):
        arrays = [
            jnp.asarray(want[k], dtype)
            for k in ("features", "global_features", "last_features")
        ]
        loss, gradient = VALUE_AND_GRAD(*arrays)
        losses = model_contrastive(*arrays)
    assert_allclose(losses, np.logaddexp(0, want["neg"] - want["pos"]), rtol=relative)
    assert_allclose(loss, want["loss"], rtol=relative)
    largest = np.abs(want["grad_features"]).max()
    assert_allclose(
        gradient, want["grad_features"], rtol=relative, atol=relative * largest
    )


def test_value_and_gradient_match_moon_with_two_previous_models(golden):
    want = golden("moon_loss")
    arrays = want["z"], want["z_global"], want["z_prev"]
    loss, gradient = VALUE_AND_GRAD(*arrays)
    assert_allclose(loss, want["loss_two_prev"], rtol=1e-6)
    assert_allclose(gradient, want["grad_z_two_prev"], rtol=1e-5, atol=1e-7)
    assert_allclose(
        mean_loss(arrays[0], arrays[1], arrays[2][0]), want["loss_one_prev"], rtol=1e-6
    )


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("length", [1e30, 1e-30])
def test_features_of_any_length_have_their_cosine(golden, which, length):
    # A random residual network, the official first previous one, reaches 1e26.
    want = golden("fedfr_contrastive")
    names = ("features", "global_features", "last_features")
    arrays = [np.asarray(want[name], np.float64) for name in names]
    arrays[which] = arrays[which] * length
    unit = [x / np.maximum(np.linalg.norm(x, axis=1), 1e-8)[:, None] for x in arrays]
    positive, negative = ((unit[0] * x).sum(1) / 0.5 for x in unit[1:])
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays]
    losses = model_contrastive(*arrays)
    assert_allclose(losses, np.logaddexp(0, negative - positive), rtol=1e-5)
    _, gradient = VALUE_AND_GRAD(*arrays)
    assert np.isfinite(gradient).all()
    assert np.asarray(gradient).any()


def test_frozen_features_get_no_gradient(golden):
    want = golden("moon_loss")
    gradients = jax.jit(jax.grad(mean_loss, argnums=(1, 2)))(
        want["z"], want["z_global"], want["z_prev"]
    )
    assert_array_equal(gradients[0], 0)
    assert_array_equal(gradients[1], 0)


@pytest.mark.parametrize("which", range(3))
def test_float32_is_finite_with_zero_features(which):
    arrays = [np.ones((2, 3), np.float32) for _ in range(3)]
    arrays[which][0] = 0
    loss, gradient = VALUE_AND_GRAD(*arrays)
    assert np.isfinite(loss) and np.isfinite(gradient).all()
