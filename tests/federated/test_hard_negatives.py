"""Similarities between a client's images and the public ones, block by block."""

import jax
import numpy as np
import pytest

from fedfr_jax.federated import hard_negatives


@pytest.mark.parametrize("rows_at_once", [8, 16, 1000])
def test_blocks_of_any_size_find_the_largest_cosine(rows_at_once, monkeypatch):
    random = np.random.default_rng(0)
    features = random.normal(size=(61, 5)).astype(np.float32)
    public = random.normal(size=(11, 5)).astype(np.float32)
    start, count = 7, 43  # neither a multiple of a block
    monkeypatch.setattr(hard_negatives, "BLOCK_SCORES", rows_at_once * len(public))
    found = jax.jit(hard_negatives.max_similarity)(
        features, np.int32(start), np.int32(count), public
    )
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
    own = unit(features[start : start + count])
    expected = (own @ unit(public).T).max(axis=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
