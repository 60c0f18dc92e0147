"""Entropy maps against the golden, and at their limits."""

import jax
import jax.numpy as jnp
import numpy as np

from fedfr_jax.evaluation.segmentation import (
    feature_entropy,
    resize_map,
    softmax_entropy,
)


def test_the_maps_are_the_goldens(golden):
    saved = golden("margin_metrics")
    with jax.enable_x64(True):
        logits = jnp.moveaxis(jnp.asarray(saved["logits_bchw"]), 1, -1)
        features = jnp.asarray(saved["feat_bhwc"])
        np.testing.assert_allclose(
            softmax_entropy(logits), saved["softmax_entropy_bhw"], rtol=1e-12
        )
        entropy = feature_entropy(features)
        np.testing.assert_allclose(entropy, saved["feat_entropy_bhw"], rtol=1e-9)
        np.testing.assert_allclose(
            resize_map(entropy, (16, 20)), saved["feat_entropy_up16x20"], rtol=1e-9
        )


def test_entropy_is_that_of_what_is_even_and_of_what_is_certain():
    even, certain = jnp.zeros((2, 8)), jnp.array([[1000.0] + [0.0] * 7] * 2)
    np.testing.assert_allclose(softmax_entropy(even), [np.log(8)] * 2, rtol=1e-6)
    np.testing.assert_allclose(softmax_entropy(certain), [0, 0], atol=1e-6)
    np.testing.assert_allclose(feature_entropy(even + 3), [np.log(8)] * 2, rtol=1e-6)
    np.testing.assert_allclose(feature_entropy(certain), [0, 0], atol=1e-6)
    np.testing.assert_array_equal(feature_entropy(-certain), [0, 0])  # none positive
    some = feature_entropy(jnp.array([-1.0, 1.0, 1.0]))
    np.testing.assert_allclose(some, np.log(2), rtol=1e-6)
    gradient = jax.grad(lambda x: feature_entropy(x).sum())(-certain)
    assert np.isfinite(gradient).all()
