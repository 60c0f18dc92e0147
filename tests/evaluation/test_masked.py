"""The score of the masked challenge beside all pairs, one by one, in NumPy."""

import numpy as np
import pytest

from fedfr_jax.evaluation.verification import masked_scores


def fnmr(scores, is_same, fpr):
    """Share of same pairs not above the first score that `fpr` forbids."""
    negatives = np.sort(scores[~is_same])[::-1]
    threshold = negatives[int(round(fpr * len(negatives), 6))]
    return 1 - (scores[is_same] > threshold).mean()


def test_scores_are_those_of_all_pairs_without_an_image_and_itself():
    rng = np.random.default_rng(0)
    labels = rng.integers(12, size=70)
    people = rng.normal(size=(12, 8))
    plain = (people[labels] + 0.6 * rng.normal(size=(70, 8))).astype(np.float32)
    masked = (plain + 0.9 * rng.normal(size=(70, 8))).astype(np.float32)
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
    is_same = labels[:, None] == labels[None]
    other = ~np.eye(70, dtype=bool)
    upper = np.triu(other)
    crossed, standard = unit(masked) @ unit(plain).T, unit(plain) @ unit(plain).T
    found = masked_scores(plain, masked, labels, fprs=(1e-2, 1e-1, 1e-7))
    for rate, name in ((1e-2, "1e-02"), (1e-1, "1e-01")):
        of_masked = fnmr(crossed[other], is_same[other], rate)
        of_standard = fnmr(standard[upper], is_same[upper], rate)
        assert found[f"masked_fnmr@far={name}"] == pytest.approx(of_masked, abs=1e-9)
        assert found[f"standard_fnmr@far={name}"] == pytest.approx(of_standard)
        score = 0.25 * of_masked + 0.75 * of_standard
        assert found[f"score@far={name}"] == pytest.approx(score)
        assert of_masked > of_standard > 0
    assert "score@far=1e-07~" in found and len(found) == 9
