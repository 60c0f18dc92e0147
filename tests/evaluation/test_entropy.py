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
        logits = np.moveaxis(saved["logits_bchw"], 1, -1)

        @jax.jit
        def maps(logits, features):
            entropy = feature_entropy(features)
            return softmax_entropy(logits), entropy, resize_map(entropy, (16, 20))

        of_logits, entropy, large = maps(logits, saved["feat_bhwc"])
    np.testing.assert_allclose(of_logits, saved["softmax_entropy_bhw"], rtol=1e-12)
    np.testing.assert_allclose(entropy, saved["feat_entropy_bhw"], rtol=1e-9)
    np.testing.assert_allclose(large, saved["feat_entropy_up16x20"], rtol=1e-9)


def test_entropy_is_that_of_what_is_even_and_of_what_is_certain():
    of_logits = jax.jit(softmax_entropy)

    @jax.jit
    def of_features(x):
        entropy, pull = jax.vjp(feature_entropy, x)
        return entropy, pull(jnp.ones_like(entropy))[0]

    even, certain = np.zeros((2, 8), np.float32), np.float32([[1000] + [0] * 7] * 2)
    np.testing.assert_allclose(of_logits(even), [np.log(8)] * 2, rtol=1e-6)
    np.testing.assert_allclose(of_logits(certain), [0, 0], atol=1e-6)
    np.testing.assert_allclose(of_features(even + 3)[0], [np.log(8)] * 2, rtol=1e-6)
    np.testing.assert_allclose(of_features(certain)[0], [0, 0], atol=1e-6)
    entropy, gradient = of_features(-certain)
    np.testing.assert_array_equal(entropy, [0, 0])  # none positive
    assert np.isfinite(gradient).all()
    some = np.float32([[-1, 1, 1] + [0] * 5] * 2)
    np.testing.assert_allclose(of_features(some)[0], [np.log(2)] * 2, rtol=1e-6)
