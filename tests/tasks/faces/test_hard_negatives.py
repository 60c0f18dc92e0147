"""Similarities between a client's images and the public ones, block by block."""

from functools import partial

import jax
import numpy as np
import pytest

from fedfr_jax.tasks.faces import frozen_features


@pytest.mark.parametrize("rows_at_once", [8, 16, 1000])
def test_blocks_of_any_size_find_the_largest_cosine(rows_at_once, monkeypatch):
    random = np.random.default_rng(0)
    features = random.normal(size=(61, 5)).astype(np.float32)
    public = random.normal(size=(11, 5)).astype(np.float32)
    start, count = 7, 43  # neither a multiple of a block
    monkeypatch.setattr(frozen_features, "BLOCK_SCORES", rows_at_once * len(public))
    found = jax.jit(frozen_features.max_similarity)(
        features, np.int32(start), np.int32(count), public
    )
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
    own = unit(features[start : start + count])
    expected = (own @ unit(public).T).max(axis=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "threshold, capacity, expected",
    [
        (0.0, 2, [0, 3]),  # of the equals the first
        (0.0, 1, [3]),
        (0.0, 3, [0, 1, 3]),
        (0.7, 2, [3]),
        (0.9, 4, [3]),
        (0.0, 0, [0, 1, 3, 4]),
    ],
)
def test_the_hardest_stay_when_equals_exceed_the_capacity(
    threshold, capacity, expected
):
    def at(cosine):
        return [cosine, np.sqrt(1 - cosine**2)]

    public = np.array([at(0.5), at(0.5), at(-0.5), at(1.0), at(0.5)], np.float32)
    settings = {"threshold": threshold, "capacity": capacity}
    find = jax.jit(partial(frozen_features.hard_negatives, **settings))
    own = np.array([[1, 0]], np.float32)
    indices, number = find(own, np.int32(0), np.int32(1), public)
    padded = expected + [0] * ((capacity or len(public)) - len(expected))
    np.testing.assert_array_equal(indices, padded)
    assert int(number) == len(expected)


def test_cosines_are_as_exact_as_the_device_can():
    """TF32 of a GPU would move images over the threshold."""
    features = np.zeros((4, 8), np.float32)
    text = str(jax.make_jaxpr(frozen_features.max_similarity)(features, 0, 2, features))
    assert text.count("dot_general") == text.count("Precision.HIGHEST, ") == 1
