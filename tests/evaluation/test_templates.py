"""Template protocols against both IJB-C scripts' numbers, and the metadata files."""

import jax
import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfr_jax.evaluation import templates
from fedfr_jax.evaluation.identification import (
    open_set_points,
    pair_tpir,
    rank_k,
    summarize_probes,
)

SETTINGS = [(n, d, f) for n in (0, 1) for d in (0, 1) for f in (0, 1)]


def fedfr_templates(released):
    weighed = templates.weigh_images(
        released["image_features"], detector_scores=released["faceness"]
    )
    return templates.aggregate_templates(
        weighed, released["template_id"], released["media_id"]
    )


def bigface_templates(released, keep_norm=1, use_detector=1, use_flip=1):
    features = released["img_feats"]
    weighed = templates.weigh_images(
        features[:, :24],
        flipped=features[:, 24:] if use_flip else None,
        detector_scores=released["det_score"] if use_detector else None,
        keep_norm=bool(keep_norm),
    )
    return templates.aggregate_templates(
        weighed, released["template_id"], released["media_id"]
    )


@pytest.mark.parametrize("is_double", [False, True])
def test_fedfr_templates_and_tar_are_the_released_ones(golden, is_double):
    released = golden("fedfr_ijbc_style_eval")
    released["image_features"] = released["image_features"].astype(
        np.float64 if is_double else np.float32
    )
    with jax.enable_x64(is_double):
        found = fedfr_templates(released)
        pairs = np.stack([released["p1"], released["p2"]], axis=1)
        scores = templates.pair_scores(found, pairs)
    atol = 1e-7 if is_double else 1e-6
    np.testing.assert_array_equal(found.ids, released["unique_templates"])
    np.testing.assert_allclose(found.features, released["template_features"], atol=atol)
    np.testing.assert_allclose(scores, released["score"], atol=atol)
    for key, drop in (("tar", True), ("tar_full_roc", False)):
        tar = templates.tar_nearest_far(
            released["label"], scores, fars=released["far"], drop_intermediate=drop
        )
        np.testing.assert_allclose(list(tar.values()), released[key], atol=1e-12)


def test_fedfr_one_to_n_is_the_released_one(golden):
    released = golden("fedfr_ijbc_style_eval")
    found, subjects = fedfr_templates(released), templates.Subjects
    probes = subjects(released["probe_templates"], released["probe_subjects"])
    gallery = subjects(released["gallery_templates"], released["gallery_subjects"])
    arguments = searched(found, probes, gallery)
    tpir = pair_tpir(*arguments, fpirs=released["fpir"])
    np.testing.assert_allclose(list(tpir.values()), released["tpir"], atol=1e-12)
    expected = [released[f"top{k}"] for k in (1, 5, 10)]
    found_ranks = list(rank_k(*arguments).values())
    np.testing.assert_allclose(found_ranks, expected, atol=1e-12)


@pytest.mark.parametrize(("n", "d", "f"), SETTINGS)
def test_insightface_tar_and_area_are_the_librarys(golden, n, d, f):
    released = golden("bigface_ijbc")
    pairs, is_same = released["pairs"][:, :2], released["pairs"][:, 2]
    scores = templates.pair_scores(bigface_templates(released, n, d, f), pairs)
    tar = templates.tar_nearest_far(is_same, scores)
    key = f"N{n}D{d}F{f}"
    np.testing.assert_allclose(list(tar.values()), released[f"{key}/tar"], atol=1e-12)
    area = templates.area_under_curve(is_same, scores)
    assert area == pytest.approx(float(released[f"{key}/auc"]), abs=1e-9)


def test_insightface_template_features_are_the_librarys(golden):
    released = golden("bigface_ijbc")
    found = bigface_templates(released)
    np.testing.assert_array_equal(found.ids, released["template_ids"])
    expected = released["N1D1F1/template_feats"]
    np.testing.assert_allclose(found.features, expected, atol=1e-6)


def searched(found, probes, gallery):
    """Features and subjects of probes and gallery entries."""
    of = lambda listed: found.features[found.rows(listed.template_ids)]
    return of(probes), probes.subject_ids, of(gallery), gallery.subject_ids


def subjects(released, name):
    names = [f"one_to_n/{name}_{part}" for part in ("templates", "subjects")]
    return templates.Subjects(*(released[x] for x in names))


def test_insightface_merged_one_to_n_is_the_librarys_printout(golden):
    released = golden("bigface_ijbc")
    found = bigface_templates(released)
    galleries = [subjects(released, f"gallery{i}") for i in (1, 2)]
    probes = subjects(released, "probe")
    arguments = searched(found, probes, templates.merge(*galleries))
    tpir = pair_tpir(*arguments, fpirs=(0.01, 0.1))
    ranks = rank_k(*arguments)
    printed = str(released["one_to_n/merged_printout"])
    for value in tpir.values():
        assert f"pr = {value:.10f}" in printed
    for k in (1, 5, 10):
        assert f"top{k} = {ranks[f'rank{k}']}" in printed


@pytest.mark.parametrize("index", [1, 2])
def test_insightface_open_set_is_the_librarys(golden, index):
    released = golden("bigface_ijbc")
    found = bigface_templates(released)
    gallery = subjects(released, f"gallery{index}")
    arguments = searched(found, subjects(released, "probe"), gallery)
    best = summarize_probes(*arguments)
    tpir, thresholds = open_set_points(best, fpirs=released["one_to_n/fars"])
    get = lambda name: released[f"one_to_n/G{index}/{name}"]
    np.testing.assert_allclose(list(tpir.values()), get("tpir"), atol=1e-12)
    np.testing.assert_allclose(thresholds, get("thresholds"), atol=1e-6)
    num_mated = np.isfinite(best[0]).sum()
    hits = np.array(list(rank_k(*arguments).values())) * num_mated
    np.testing.assert_allclose(hits, get("top1_5_10_counts"), atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    scores=st.lists(st.integers(0, 6), min_size=4, max_size=25),
    seed=st.integers(0, 9),
    drop=st.booleans(),
)
def test_roc_is_that_of_scikit_learn(scores, seed, drop):
    is_same = np.random.default_rng(seed).random(len(scores)) < 0.5
    is_same[:2] = [True, False]
    found = templates.roc_points(is_same, np.float64(scores), drop_intermediate=drop)
    expected = sklearn.metrics.roc_curve(is_same, scores, drop_intermediate=drop)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-15)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-15)


def test_a_medium_shared_by_two_templates_is_two_media():
    features = np.eye(2, dtype=np.float32)
    found = templates.aggregate_templates(features, [8, 3], [1, 1])
    np.testing.assert_allclose(found.features, features[::-1], atol=1e-6)
    assert found.ids.tolist() == [3, 8]


def test_unknown_templates_and_one_kind_of_pair_are_refused():
    found = templates.aggregate_templates(np.eye(2, dtype=np.float32), [8, 3], [1, 1])
    with pytest.raises(ValueError, match=r"got \[4\]"):
        templates.pair_scores(found, [[3, 8], [3, 4]])
    with pytest.raises(ValueError, match="one same and one different"):
        templates.tar_nearest_far([1, 1], [0.1, 0.2])
    with pytest.raises(ValueError, match="finite"):
        templates.tar_nearest_far([1, 0], [0.1, np.nan])


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def test_metadata_files_are_read(tmp_path):
    images = templates.read_template_media(
        write(tmp_path, "tid_mid.txt", "1.jpg 1 69544\n2.jpg 1 69544\n3.jpg 7 5\n")
    )
    assert images.names == ("1.jpg", "2.jpg", "3.jpg")
    assert images.template_ids.tolist() == [1, 1, 7]
    assert images.media_ids.tolist() == [69544, 69544, 5]
    names, landmarks, scores = templates.read_landmarks(
        write(tmp_path, "5pts.txt", "1.jpg 1 2 3 4 5 6 7 8 9 10.5 0.875\n")
    )
    assert names == ("1.jpg",)
    assert landmarks.shape == (1, 5, 2) and landmarks[0, 4].tolist() == [9, 10.5]
    assert scores.tolist() == [0.875]
    pairs, is_same = templates.read_pairs(write(tmp_path, "p.txt", "1 7 0\n1 1 1\n"))
    assert pairs.tolist() == [[1, 7], [1, 1]] and is_same.tolist() == [False, True]
    header = "TEMPLATE_ID,SUBJECT_ID,FILENAME,FACE_X\n"
    subjects = templates.read_subjects(
        write(tmp_path, "G1.csv", header + "7,3,img/1.png,4\n7,3,img/2.png,4\n2,9,a,\n")
    )
    assert subjects.template_ids.tolist() == [2, 7]
    assert subjects.subject_ids.tolist() == [9, 3]


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (templates.read_template_media, "1.jpg 1 2\n2.jpg 1\n", "must be a table"),
        (templates.read_template_media, "1.jpg one 2\n", "invalid literal"),
        (templates.read_landmarks, "1.jpg 1 2 3\n", "12 columns, got 4"),
        (templates.read_pairs, "1 2\n", "3 columns, got 2"),
        (templates.read_pairs, "1 2 5\n", "must have 0 or 1 per line"),
        (templates.read_pairs, "", "no data"),
        (templates.read_subjects, "T,S\n1,2\n1,3\n", "got 2 for template 1"),
        (templates.read_subjects, "T,S\na,2\n", "table of numbers"),
    ],
)
def test_broken_metadata_is_refused_by_file_name(tmp_path, read, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(write(tmp_path, "broken.txt", text))
    assert "broken.txt" in str(caught.value)
