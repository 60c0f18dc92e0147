"""Judging on templates: the released numbers by the config's keys, of aligned faces."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from fedfr_jax.data.align import arcface_template
from fedfr_jax.data.sources.folder import folder
from fedfr_jax.data.stream import stream
from fedfr_jax.evaluation import templates
from fedfr_jax.tasks.faces.evaluation_sets import template_set
from tests.tasks.faces.evaluation_files import (
    SMALL,
    evaluator_of,
    looked_up,
    opened,
    write_release,
)


@pytest.mark.parametrize("num_devices", [1, 3])
def test_templates_by_config_give_the_released_numbers(
    task, released, release, num_devices
):
    evaluator = evaluator_of(
        task, num_devices, templates={"path": str(release), "align": False}, **SMALL
    )
    evaluation = evaluator.generic(
        looked_up, jnp.asarray(released["image_features"][None])
    )
    found = {k: v for k, v in evaluation.metrics.items() if k.startswith("ijb_")}
    # 1,707 pairs of two people and 37 probes do not tell the rates with a mark.
    rates = ("1e-06~", "1e-05~", "1e-04~", "1e-03", "1e-02", "1e-01")
    fars = [f"ijb_tar@far={rate}" for rate in rates]
    fpirs = ["ijb_tpir@fpir=1e-02~", "ijb_tpir@fpir=1e-01"]
    names = [*fars, "ijb_auc", *fpirs, *(f"ijb_rank{k}" for k in (1, 5, 10))]
    assert list(found) == names
    ranks = [released[f"top{k}"] for k in (1, 5, 10)]
    area = roc_auc_score(released["label"], released["score"])
    expected = [*released["tar"], area, *released["tpir"], *ranks]
    np.testing.assert_allclose(list(found.values()), expected, atol=1e-12)


def test_strangers_among_the_probes_set_the_threshold_of_the_open_set(
    task, released, release
):
    """Galleries apart, as open-set protocols have them: best scores by hand."""
    listed = {"path": str(release), "align": False, "pairs": None}
    gallery = "meta/ijbc_1N_gallery_G1.csv"
    evaluator = evaluator_of(task, 1, templates={**listed, "gallery": gallery}, **SMALL)
    evaluation = evaluator.generic(
        looked_up, jnp.asarray(released["image_features"][None])
    )
    scores = released["probe_features"] @ released["gallery_features"][:9].T
    is_mate = released["probe_ids"][:, None] == released["gallery_ids"][None, :9]
    has_mate = is_mate.any(axis=1)
    assert 0 < has_mate.sum() < len(has_mate)
    threshold = scores[~has_mate].max()  # a tenth of so few strangers is one at most
    best = np.where(is_mate, scores, -1).max(axis=1)
    is_found = (best == scores.max(axis=1)) & (best > threshold)
    expected = is_found[has_mate].mean()
    found = evaluation.metrics["ijb_open_tpir@fpir=1e-02~"]  # 17 strangers
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_faceness_norms_and_mirror_images_count_as_told(released, release):
    features = released["image_features"].astype(np.float32)
    views = np.stack([features, features[:, ::-1] * 0.5], axis=1)
    for flip, faceness, keep_norm in [(True, False, False), (True, True, True)]:
        options = {
            "flip_test": flip,
            "use_detector_score": faceness,
            "use_norm_score": keep_norm,
        }
        options |= {"path": release, "align": False, "probes": None, "fars": 0.1}
        given = opened(template_set, **options)
        weighed = templates.weigh_images(
            features,
            flipped=views[:, 1],
            detector_scores=released["faceness"] if faceness else None,
            keep_norm=keep_norm,
        )
        found = templates.aggregate_templates(
            weighed, released["template_id"], released["media_id"]
        )
        pairs = np.stack([released["p1"], released["p2"]], axis=1)
        compared = released["label"], templates.pair_scores(found, pairs)
        expected = templates.tar_nearest_far(*compared, fars=(0.1,))
        expected["auc"] = templates.area_under_curve(*compared)
        assert given.is_mirrored and given.metrics(views) == expected


def test_templates_are_streamed_as_the_partition_is(task, released, release):
    read, labels = lambda i: task.tests.images[i], task.tests.labels
    streamed = task._replace(tests=stream(read, labels, memory=2 * 20 * 16))
    network = jnp.asarray(released["image_features"][None])
    options = {"templates": {"path": release, "align": False}, **SMALL}
    evaluation = [
        evaluator_of(t, 2, **options).generic(looked_up, network).metrics
        for t in (task, streamed)
    ]
    assert evaluation[0] == evaluation[1]


def test_faces_are_aligned_by_the_landmarks_of_the_list(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (4, 60, 50, 3), np.uint8)
    points = 0.4 * arcface_template((112, 112)) + rng.normal(size=(4, 5, 2)) + 4
    points = points.astype(np.float32)
    lines = [(*p.reshape(-1).tolist(), 1.0) for p in points]
    pairs, subjects = [(0, 1, 1), (0, 2, 0)], [(0, 7), (1, 7), (2, 8)]
    listed = [(0, 1), (1, 2), (1, 3), (2, 4)]
    write_release(
        tmp_path, images, listed, lines, pairs, (subjects[:1], subjects[2:]), [(1, 7)]
    )
    points_file = tmp_path / "meta" / "ijbc_name_5pts_score.txt"
    names = points_file.read_text().splitlines()
    points_file.write_text("\n".join(names[::-1]))  # another order than the images
    columns = [f"{axis}{i}" for i in range(1, 6) for axis in "xy"]
    rows = [f"{i + 1}.png,{','.join(map(str, line))}" for i, line in enumerate(lines)]
    (tmp_path / "a.csv").write_text("\n".join([",".join(["name", *columns]), *rows]))
    expected = folder(
        tmp_path / "loose_crop",
        image_size=24,
        filename_pattern=r"(?P<identity>.+)\.png",
        landmarks=tmp_path / "a.csv",
        align=True,
    )
    found = opened(template_set, (24, 24, 3), path=tmp_path)
    rows = np.array([2, 0, 3, 1])
    np.testing.assert_array_equal(found.source.read(rows), expected.read(rows))
    stretched = opened(template_set, (24, 24, 3), path=tmp_path, align=False)
    assert (stretched.source.read(rows) != found.source.read(rows)).any()
    archive = shutil.make_archive(tmp_path / "crops", "zip", tmp_path / "loose_crop")
    zipped = opened(template_set, (24, 24, 3), path=tmp_path, images=archive)
    np.testing.assert_array_equal(zipped.source.read(rows), expected.read(rows))
