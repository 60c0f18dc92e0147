"""MMD: golden numbers, and cases worked by hand."""

import numpy as np

from fedfr_jax.evaluation.mmd import median_distance, mmd_squared


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
