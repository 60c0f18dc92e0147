"""Judging on pairs: released accuracies, and thresholds of folds, lists and bins."""

import numpy as np
import pytest

from fedfr_jax.evaluation import verification
from fedfr_jax.tasks.faces.evaluation_sets import pair_list
from tests.tasks.faces.evaluation_files import (
    SHAPE,
    SMALL,
    evaluator_of,
    looked_up,
    numbered,
    opened,
    png,
    write_bin,
)


def write_list(path, pairs):
    path.write_text("# first second same\n\n" + "\n".join(pairs) + "\n")


def test_pairs_by_config_give_the_released_accuracy(task, golden, tmp_path):
    arrays = golden("fedfr_pair_verification")
    features, is_same = arrays["embeddings"].astype(np.float32), arrays["issame"]
    path = write_bin(tmp_path / "lfw.bin", is_same)
    evaluator = evaluator_of(task, 2, pairs=str(path), **SMALL)
    plain = evaluator_of(task, 2, **SMALL)
    evaluation = evaluator.generic(looked_up, features[None]).metrics
    mean = float(arrays["accuracy_mean"])
    assert evaluation["pairs_accuracy"] == pytest.approx(mean, abs=1e-6)
    distances = verification.pair_distances(features)
    counts = verification.count_accepted(distances, is_same)
    # 270 pairs of two people in nine folds do not tell a rate of 0.001.
    for far, name in ((1e-3, "tar@far=1e-03~"), (1e-2, "tar@far=1e-02")):
        tar, _, _ = verification.fold_tar(counts, far)
        assert evaluation[f"pairs_{name}"] == pytest.approx(tar.mean(), abs=1e-6)
    without = plain.generic(looked_up, features[None]).metrics
    assert list(without) == ["tar@far=1e-01", "tpir@fpir=5e-01", "accuracy"]
    assert without.items() <= evaluation.items() and len(evaluation) == 6


def test_pairs_are_judged_by_the_sum_with_mirror_images_unless_told(tmp_path):
    rng = np.random.default_rng(0)
    is_same = np.tile([True, False], 30)
    views = rng.normal(size=(120, 2, 6)).astype(np.float32)
    path = write_bin(tmp_path / "a.bin", is_same)
    given = opened(pair_list, SHAPE, path=path, folds=5, fars=0.2)
    expected = verification.ten_fold(
        verification.flip_sum(views[:, 0], views[:, 1]), is_same, folds=5
    )
    assert given.is_mirrored
    assert given.metrics(views)["accuracy"] == expected["accuracy"]
    single = opened(pair_list, SHAPE, path=path, folds=5, flip_test=False)
    expected = verification.ten_fold(views[:, 0], is_same, folds=5)["accuracy"]
    assert not single.is_mirrored
    assert single.metrics(views[:, :1])["accuracy"] == expected


def test_a_development_list_sets_the_thresholds_of_a_list_without_folds(tmp_path):
    """All same pairs, then all different ones, as LFW's View 1 has them; by hand."""
    for i in range(24):
        (tmp_path / f"{i}.png").write_bytes(png(numbered([i])[0]))
    pairs = lambda start: [
        f"{start + 2 * i}.png {start + 2 * i + 1}.png {int(i < 3)}" for i in range(6)
    ]
    write_list(tmp_path / "dev.txt", pairs(0))
    write_list(tmp_path / "test.txt", pairs(12))
    source = lambda name: {"name": "listed_pairs", "path": str(tmp_path), "pairs": name}
    given = opened(
        pair_list,
        SHAPE,
        source=source("test.txt"),
        threshold_pairs=source("dev.txt"),
        fars=(0.2, 0.4),
        flip_test=False,
    )
    assert given.source.labels.size == 24
    seen = given.source.read(np.array([23, 0, 13, 11]))
    # Each list has its images in the order of their names.
    order = np.concatenate([sorted(range(k, k + 12), key=str) for k in (0, 12)])
    np.testing.assert_array_equal(seen, numbered(order[[23, 0, 13, 11]]))
    features = np.random.default_rng(7).normal(size=(24, 1, 3))
    metrics = given.metrics(features[order])
    unit = features[:, 0] / np.linalg.norm(features[:, 0], axis=1, keepdims=True)
    far = np.square(unit[0::2] - unit[1::2]).sum(1)
    is_same, at = np.arange(6) < 3, verification.THRESHOLDS
    right = [((far[:6] < t) == is_same).sum() for t in at]
    best = at[int(np.argmax(right))]
    assert metrics["accuracy"] == ((far[6:] < best) == is_same).mean()
    # One of three different pairs of the development list may be accepted at 0.4.
    second = np.sort(far[3:6])[1]
    limit = at[at <= second].max()
    tar = (far[6:9] < limit).mean()
    np.testing.assert_allclose(metrics["tar@far=4e-01"], tar)
    assert list(metrics) == ["accuracy", "tar@far=2e-01~", "tar@far=4e-01"]
    with pytest.raises(ValueError, match="config.evaluation.set: every fold must"):
        opened(pair_list, SHAPE, source=source("test.txt"), folds=2)
    for line in ("0.png 1.png maybe", "0.png 0.png 1", "0.png 1"):
        write_list(tmp_path / "bad.txt", [line])
        with pytest.raises(ValueError, match="bad.txt line 3 must be two images and"):
            opened(pair_list, SHAPE, source=source("bad.txt"))
    write_list(tmp_path / "bad.txt", ["0.png 99.png 1"])
    with pytest.raises(ValueError, match="must have every listed image, got 1 of"):
        opened(pair_list, SHAPE, source=source("bad.txt"))


def test_any_source_with_pairs_is_a_pair_list(tmp_path):
    for person in range(4):
        (tmp_path / f"p{person}").mkdir()
        for image in range(2):
            file = tmp_path / f"p{person}" / f"p{person}_{image + 1:04d}.png"
            file.write_bytes(png(np.full((8, 8, 3), 20 * person + image, np.uint8)))
    same = ["p0 1 2", "p2 1 2"]
    different = ["p0 1 p2 1", "p0 2 p3 2"]
    lines = ["2 1", same[0], different[0], same[1], different[1]]
    (tmp_path / "pairs.txt").write_text("\n".join(lines))
    source = {"name": "lfw", "data_dir": tmp_path, "pairs": "pairs.txt"}
    source["align"] = False
    given = opened(pair_list, (8, 8, 3), source=source, folds=2)
    assert given.source.labels.size == 5  # both of p0 and of p2, p3's second
    values = given.source.read(np.arange(5)).mean((1, 2, 3))
    np.testing.assert_allclose(values, [0, 1, 40, 41, 61])
