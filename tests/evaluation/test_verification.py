"""Ten-fold protocol against InsightFace's and FedFR's numbers; all-pairs protocol."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics

from fedfr_jax.evaluation import verification
from fedfr_jax.evaluation.score_tiles import unit_length

CASES = ("lfwlike", "hard", "uneven", "ties")


def counts_of(golden, case):
    arrays = golden("bigface_verification")
    get = lambda name: arrays[f"{case}/{name}"]
    embeddings = verification.flip_sum(get("emb"), get("emb_flip"))
    distances = verification.pair_distances(embeddings)
    counts = verification.count_accepted(distances, get("issame"))
    return get, embeddings, distances, counts


@pytest.mark.parametrize("is_double", [False, True])
def test_fedfr_accuracy_is_the_released_one(golden, is_double):
    released = golden("fedfr_pair_verification")
    with jax.enable_x64(is_double):
        distances = verification.pair_distances(released["embeddings"])
        result = verification.ten_fold(released["embeddings"], released["issame"])
    counts = verification.count_accepted(distances, released["issame"])
    accuracy, _ = verification.fold_accuracies(counts)
    np.testing.assert_allclose(accuracy, released["accuracy_folds"], atol=1e-12)
    assert result["accuracy"] == pytest.approx(float(released["accuracy_mean"]))
    assert result["accuracy_std"] == pytest.approx(float(released["accuracy_std"]))
    for name, accepted, total in (
        ("tpr", counts.same, counts.num_same),
        ("fpr", counts.different, counts.num_different),
    ):
        rates = (accepted / total[:, None]).mean(axis=0)
        np.testing.assert_allclose(rates, released[name], atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_insightface_accuracy_is_the_librarys(golden, case):
    get, embeddings, distances, counts = counts_of(golden, case)
    np.testing.assert_allclose(distances, get("dist"), atol=2e-6)
    accuracy, thresholds = verification.fold_accuracies(counts)
    np.testing.assert_allclose(accuracy, get("fold_acc"), atol=1e-12)
    result = verification.ten_fold(embeddings, get("issame"))
    expected = [*get("acc_mean_std"), thresholds.mean()]
    np.testing.assert_allclose(list(result.values()), expected, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_rates_at_every_threshold_are_the_librarys(golden, case):
    get, _, _, counts = counts_of(golden, case)
    # Distances of the `ties` case lie on thresholds, where the last bit decides.
    atol = 0.0101 if case == "ties" else 1e-12
    for name, accepted, total in (
        ("tpr400", counts.same, counts.num_same),
        ("fpr400", counts.different, counts.num_different),
    ):
        rates = (accepted / total[:, None]).mean(axis=0)
        np.testing.assert_allclose(rates, get(name), atol=atol)
    at_grid = get("val_far_at_grid")
    whole = counts.same.sum(axis=0) / counts.num_same.sum()
    np.testing.assert_allclose(whole[::5], at_grid[:, 0], atol=atol)


@pytest.mark.parametrize("far", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("case", CASES)
def test_conservative_tar_is_the_reference(golden, case, far):
    get, _, _, counts = counts_of(golden, case)
    tar, measured, thresholds = verification.fold_tar(counts, far)
    key = f"tar_conservative_far{far}"
    np.testing.assert_allclose(thresholds, get(f"{key}_thresholds"), atol=1e-12)
    found = [tar.mean(), tar.std(), measured.mean()]
    np.testing.assert_allclose(found, get(key), atol=1e-12)


def test_bad_pair_lists_are_refused():
    x, same = np.eye(8, dtype=np.float32), np.array([1, 0, 1, 0], bool)
    with pytest.raises(
        ValueError, match=r"folds must be in \[2, 4\], the number of pairs, got 10"
    ):
        verification.ten_fold(x, same)
    with pytest.raises(ValueError, match="finite"):
        verification.ten_fold(np.full((8, 2), np.inf), same, folds=2)
    with pytest.raises(ValueError, match="of different identity, got none in fold 1"):
        is_same = np.array([1, 0, 1, 1], bool)
        distances = verification.pair_distances(x)
        counts = verification.count_accepted(distances, is_same, folds=2)
        verification.fold_tar(counts, 0.1)


def test_generic_tar_is_that_of_the_whole_matrix():
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(30), 6)
    features = random.standard_normal((30, 8))[labels]
    features = np.float32(features + 0.8 * random.standard_normal(features.shape))
    x = np.asarray(unit_length(jnp.asarray(features)))
    first, second = np.triu_indices(len(x), 1)
    cosines, is_same = (x @ x.T)[first, second], labels[first] == labels[second]
    negatives = np.sort(cosines[~is_same])[::-1]
    fars = (1e-3, 1e-2, 1e-1)
    expected = [
        np.mean(cosines[is_same] > negatives[int(far * len(negatives))]) for far in fars
    ]
    result = verification.generic_verification(features, labels, fars=fars)
    assert list(result) == ["tar@far=1e-03", "tar@far=1e-02", "tar@far=1e-01"]
    np.testing.assert_allclose(list(result.values()), expected, atol=3e-3)

    roc = verification.roc_curve(features, labels, points=50)
    far, tar, *counts, thresholds = roc
    assert counts == [np.sum(~is_same), np.sum(is_same)]
    for rate, share, least in zip(far, tar, thresholds, strict=True):
        np.testing.assert_allclose(share, np.mean(cosines[is_same] >= least), atol=1e-2)
        assert np.mean(cosines[~is_same] >= least + 4e-5) <= rate + 1e-9
    assert verification.threshold_at(roc, 0.01) == thresholds[far <= 0.01][-1]
    with pytest.raises(ValueError, match=f"at least 1 / {counts[0]}, the number"):
        verification.threshold_at(roc, 0.5 / counts[0])
    full_far, full_tar, _ = sklearn.metrics.roc_curve(is_same, cosines)
    best = [full_tar[full_far <= wanted + 1e-12].max() for wanted in far]
    np.testing.assert_allclose(tar, best, atol=0.02)
    assert np.all(tar <= np.asarray(best) + 1e-9)
    assert np.all(np.diff(tar) >= 0) and tar[-1] == 1 and far[-1] == 1
