"""Rank-k and open set: hand-worked cases, dense oracle, both IJB-C scripts' numbers."""

import numpy as np
import pytest

from fedfr_jax.evaluation import identification
from fedfr_jax.evaluation.identification import generic_identification

# Scores of three probes against a gallery of unit axes are the probes' coordinates.
GALLERY = np.eye(3, dtype=np.float32)
PROBES = np.float32([[0.8, 0.6, 0], [0.6, 0.8, 0], [0, 0.6, 0.8], [0.48, 0.6, 0.64]])


def test_rank_k_by_hand():
    result = identification.rank_k(
        PROBES[:3], [0, 0, 0], GALLERY, [0, 1, 2], ranks=(1, 2, 3)
    )
    # Ranks 1, 2 and 3.
    assert result == pytest.approx({"rank1": 1 / 3, "rank2": 2 / 3, "rank3": 1.0})


def test_open_set_by_hand():
    # Two unmated probes (subject 9) with best scores 0.64 and 0.8.
    probes, subjects = PROBES[[0, 1, 3, 2]], [0, 0, 9, 9]
    result = identification.open_set_tpir(
        probes, subjects, GALLERY, [0, 1, 2], fpirs=(0.1, 0.5, 1.0)
    )
    # 0.8 > 0.8 is false; at FPIR 1 only the rank-1 probe passes 0.64.
    assert list(result.values()) == [0.0, 0.0, 0.5]


def test_pair_tpir_by_hand():
    result = identification.pair_tpir(
        PROBES, [0, 1, 2, 9], GALLERY, [0, 1, 2], fpirs=(0.2, 0.99)
    )
    # Negatives from the top: 0.64, 0.6, 0.6, 0.6, 0.6, ...; k = 1 and 4.
    assert list(result.values()) == [1.0, 1.0]


def test_strangers_are_sought_among_templates_of_half_their_images():
    """The third image of two and the second of one are probes; one only enrolls."""
    low = np.float32([0.8, 0.6, 0, 0])
    x, y, z, w = np.eye(4, dtype=np.float32)
    features = np.stack([z, 3 * x, low, y, 2 * y, w, z])
    labels = [7, 5, 5, 2, 2, 9, 7]
    # Probes: low, whose mate x has 0.8 and y 0.6; y and z, whose mates have 1.
    find = lambda f, **rates: generic_identification(f, labels, **rates)
    rates = {"fpirs": (0.1, 0.4)}  # of three probes: the largest, the second
    assert find(features, **rates) == {"tpir@fpir=1e-01~": 1.0, "tpir@fpir=4e-01": 1.0}
    features[2] = low[[1, 0, 2, 3]]  # now nearer to y than to x
    found = find(features, fpirs=(0.4, 0.9))
    assert list(found.values()) == pytest.approx([1.0, 1.0])
    assert find(features, fpirs=(0.1,)) == {"tpir@fpir=1e-01~": pytest.approx(2 / 3)}
    # A template between x and y has 0.99 with low at unit length, 0.7 as a mean.
    both = np.stack([x, y, low, x, x])
    found = generic_identification(both, [0, 0, 0, 1, 1], fpirs=(0.1,))
    assert found == {"tpir@fpir=1e-01~": 1.0}  # others have at most 0.8
    for few in ([1, 1, 1], [1, 2, 3]):
        with pytest.raises(
            ValueError, match="at least two identities, one with two images"
        ):
            generic_identification(features[:3], few, fpirs=(0.1,))


def test_ties_count_against_the_probe():
    same = np.ones((4, 3), np.float32)
    result = identification.rank_k(same, [0, 1, 2, 0], same[:3], [0, 1, 2])
    assert result == {"rank1": 0.0, "rank5": 1.0, "rank10": 1.0}


@pytest.mark.parametrize("size", [1, 60, 400])  # a probe, some, nearly all at once
def test_summaries_do_not_depend_on_the_block(size):
    random = np.random.default_rng(size)
    probes, gallery = (np.float32(random.standard_normal((n, 5))) for n in (37, 11))
    probe_ids, gallery_ids = random.integers(14, size=37), random.permutation(14)[:11]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identification, "_BLOCK_SIZE", size)
        best = identification.summarize_probes(probes, probe_ids, gallery, gallery_ids)
    probes /= np.linalg.norm(probes, axis=1, keepdims=True)
    cosines, is_mate = probes @ gallery.T, probe_ids[:, None] == gallery_ids
    mated = np.where(is_mate, cosines, -np.inf).max(axis=1)
    others = np.where(is_mate, -np.inf, cosines)
    np.testing.assert_allclose(best[0], mated, atol=1e-5)
    np.testing.assert_allclose(best[1], others.max(axis=1), atol=1e-5)
    has_mate = np.isfinite(mated)
    ahead = (others > mated[:, None]).sum(axis=1)
    np.testing.assert_array_equal(best[2][has_mate], ahead[has_mate])


@pytest.mark.parametrize("sizes", [(0,), (1, 6, 13)])
def test_distractors_in_parts_are_a_gallery_of_strangers(sizes):
    rng = np.random.default_rng(3)
    labels = np.arange(9)
    probes, gallery = rng.normal(size=(2, 9, 5)).astype(np.float32)
    gallery += 0.7 * probes
    parts = [rng.normal(size=(n, 5)).astype(np.float32) for n in sizes if n]
    best = identification.summarize_probes(probes, labels, gallery, labels)
    found = identification.with_distractors(best, probes, parts, tile_size=(4, 8))
    whole = np.concatenate([gallery, *parts])
    strangers = 100 + np.arange(len(whole) - 9)
    everybody = np.concatenate([labels, strangers])
    expected = identification.summarize_probes(probes, labels, whole, everybody)
    np.testing.assert_allclose(found, expected, atol=1e-6)
