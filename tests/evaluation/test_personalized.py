"""The personalized protocol against the released evaluation's numbers."""

import itertools

import jax
import numpy as np
import pytest

from fedfr_jax.evaluation import personalized
from fedfr_jax.evaluation.score_tiles import pair_tiles

CLASSES = np.arange(60).reshape(3, 20)


@pytest.fixture
def released(golden):
    return golden("fedfr_personalized_eval")


@pytest.mark.parametrize("is_double", [False, True])
@pytest.mark.parametrize("client", range(3))
def test_exact_tar_is_the_released_one(released, client, is_double):
    with jax.enable_x64(is_double):
        tar = personalized.client_verification(
            released["features"].astype(np.float64 if is_double else np.float32),
            released["labels"],
            np.isin(released["labels"], CLASSES[client]),
            fars=(1e-1, 1e-2, 1e-3, 1e-4),
        )
    expected = released[f"exact_tar_client{client}"]
    # One positive of 15,600 may change sides with the summation order.
    np.testing.assert_allclose(list(tar.values()), expected, atol=1.01 / 15_600)


@pytest.mark.parametrize("negatives", ["all", "other_clients"])
def test_negatives_are_all_others_or_those_of_other_clients(negatives):
    """Against a loop over pairs, in blocks smaller than the set."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(30, 4)).astype(np.float32)
    labels = rng.integers(6, size=30)
    is_own = labels < 3
    counts = {0: 0, 1: 0}
    for i, j in itertools.combinations(range(30), 2):
        same, both = labels[i] == labels[j], is_own[i] and is_own[j]
        if (is_own[i] or is_own[j]) and (same or negatives == "all" or not both):
            counts[same] += 1
    blocks = pair_tiles(features, labels, is_own, tile_size=(7, 8), negatives=negatives)
    kinds = np.concatenate([np.ravel(block.kinds) for block in blocks()])
    assert counts == {kind: (kinds == kind).sum() for kind in (0, 1)}
    point = personalized.client_verification(
        features, labels, is_own, fars=(0.2,), negatives=negatives
    )
    x = features / np.linalg.norm(features, axis=1, keepdims=True)
    different = labels[:, None] != labels
    if negatives == "other_clients":
        different &= ~(is_own[:, None] & is_own)
    pairs = np.triu(is_own[:, None] | is_own, 1)
    scores = np.sort((x @ x.T)[pairs & different])[::-1]
    same = (x @ x.T)[pairs & (labels[:, None] == labels)]
    wanted = (same > scores[int(0.2 * len(scores))]).mean()
    assert point["tar@far=2e-01"] == pytest.approx(wanted, abs=1e-6)


def test_binned_tar_is_the_released_table(released):
    verify = personalized.client_verification_binned
    features, labels, fars = released["features"], released["labels"], (0.1, 0.01)
    fars += (1e-3, 1e-4)
    owned = [np.isin(labels, classes) for classes in CLASSES]
    result = personalized.mean_over_clients(
        [verify(features, labels, is_own, fars=fars) for is_own in owned]
    )
    percent = 100 * np.stack(list(result.per_client.values()), axis=1)
    expected = released["tpr_percent_far_1e-1_to_1e-6"][:, :4]
    np.testing.assert_allclose(percent, expected, atol=0.0101)
    mean = 100 * np.array(list(result.mean.values()))
    np.testing.assert_allclose(
        mean, released["tpr_percent_mean_over_clients"][:4], atol=0.0101
    )


def test_gallery_is_the_released_mean_and_keeps_its_norm(released):
    for client, classes in enumerate(CLASSES):
        means = personalized.class_means(
            released["gallery_image_features"],
            released["gallery_image_labels"],
            classes,
        )
        np.testing.assert_allclose(
            means, released[f"gallery_client{client}"], atol=1e-6
        )


def test_tpir_is_the_released_one(released):
    names = ("features", "labels", "gallery_image_features", "gallery_image_labels")
    arrays, fpirs = [released[name] for name in names], released["tpir_fpir"]
    identify = personalized.client_identification
    result = personalized.mean_over_clients(
        [identify(*arrays, classes, fpirs=fpirs) for classes in CLASSES]
    )
    assert list(result.mean)[:2] == ["tpir@fpir=1e-06", "tpir@fpir=1e-05"]
    per_client = np.stack(list(result.per_client.values()), axis=1)
    np.testing.assert_allclose(per_client, released["tpir_clients"], atol=1e-9)
    mean = list(result.mean.values())
    np.testing.assert_allclose(mean, released["tpir_mean"], atol=1e-9)


def test_a_collapsed_network_accepts_nobody():
    labels = np.repeat(np.arange(4), 5)
    features = np.ones((20, 3), np.float32)
    tar = personalized.client_verification(features, labels, labels < 2, fars=(0.1,))
    assert tar == {"tar@far=1e-01": 0.0}
    zero = personalized.client_verification(0 * features, labels, labels < 2)
    assert set(zero.values()) == {0.0}


def test_a_class_without_gallery_images_is_refused():
    x, y = np.eye(3, dtype=np.float32), np.arange(3)
    with pytest.raises(ValueError, match=r"got none for \[7\]"):
        personalized.client_identification(x, y, x, y, [0, 7])
