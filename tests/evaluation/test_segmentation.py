"""Confusion matrices against a plain loop, and overlap worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedfr_jax.evaluation.segmentation import confusion_matrix, segmentation_scores
from fedfr_jax.types import IGNORE_INDEX


def test_a_confusion_matrix_is_a_loop_over_the_pixels_that_count():
    rng = np.random.default_rng(0)
    truth = rng.choice([0, 1, 2, 3, IGNORE_INDEX, -1], size=(3, 7, 5)).astype(np.int16)
    predicted = rng.integers(0, 4, truth.shape).astype(np.int32)
    expected = np.zeros((4, 4), int)
    for t, p in zip(truth.ravel(), predicted.ravel(), strict=True):
        if t not in (IGNORE_INDEX, -1):
            expected[t, p] += 1
    count = jax.jit(confusion_matrix, static_argnums=2)
    found = count(jnp.asarray(truth), jnp.asarray(predicted), 4)
    np.testing.assert_array_equal(found, expected)
    assert 0 < expected.sum() < truth.size


def test_overlap_by_hand():
    # Class 2 is nowhere; class 3 is predicted only.
    counts = [[3, 1, 0, 0], [0, 4, 0, 2], [0, 0, 0, 0], [0, 0, 0, 0]]
    found = segmentation_scores(np.array(counts))
    np.testing.assert_allclose(found.iou, [3 / 4, 4 / 7, np.nan, 0])
    assert found.mean_iou == pytest.approx((3 / 4 + 4 / 7 + 0) / 3)
    assert found.pixel_accuracy == pytest.approx(7 / 10)
