"""MMD and entropies: golden numbers, and cases worked by hand."""

import jax
import numpy as np
import pytest

from fedfr_jax.evaluation.representation import (
    enlarged,
    feature_entropy,
    median_distance,
    mmd_squared,
    softmax_entropy,
)


def test_the_discrepancy_of_two_samples_is_the_golden_one(golden):
    arrays = golden("margin_metrics")
    x, y = arrays["mmd_x"], arrays["mmd_y"]
    near = {"rtol": 1e-10}
    sigma = median_distance(np.concatenate([x, y]))
    np.testing.assert_allclose(sigma, arrays["mmd_sigma"], **near)
    found = {
        "mmd2_biased": mmd_squared(x, y),
        "mmd2_unbiased": mmd_squared(x, y, unbiased=True),
        "mmd2_linear": mmd_squared(x, y, kernel="linear"),
    }
    for name, value in found.items():
        np.testing.assert_allclose(value, arrays[name], err_msg=name, **near)


def test_entropies_of_maps_are_the_golden_ones(golden):
    arrays = golden("margin_metrics")
    with jax.enable_x64(True):
        logits = np.moveaxis(arrays["logits_bchw"], 1, -1)
        got = softmax_entropy(logits)
        np.testing.assert_allclose(got, arrays["softmax_entropy_bhw"], rtol=1e-10)
        got = feature_entropy(arrays["feat_bhwc"])
        np.testing.assert_allclose(got, arrays["feat_entropy_bhw"], rtol=1e-9)
        large = enlarged(got, (16, 20))
        np.testing.assert_allclose(large, arrays["feat_entropy_up16x20"], rtol=1e-9)


def test_equal_samples_are_not_apart_and_dead_features_have_no_entropy():
    x = np.random.default_rng(0).normal(size=(8, 3))
    assert abs(mmd_squared(x, x[::-1])) < 1e-12
    assert mmd_squared(x, x + 1, kernel="linear") == pytest.approx(3)
    entropy = feature_entropy(np.array([[-1.0, -2.0], [3.0, -1.0], [2.0, 2.0]]))
    np.testing.assert_allclose(entropy, [0, 0, np.log(2)], atol=1e-6)
    np.testing.assert_allclose(softmax_entropy(np.zeros((1, 5))), np.log(5), rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((np.ones((2, 3)), np.ones((2, 4))), {}, "samples must be"),
        ((np.ones((1, 3)), np.ones((2, 3))), {"unbiased": True}, "at least 2"),
        ((np.ones((2, 3)), np.ones((2, 3))), {}, "sigma must be positive, got 0"),
        ((np.ones((2, 3)), np.ones((2, 3))), {"kernel": "cubic"}, "kernel must be"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        mmd_squared(*arguments, **options)
