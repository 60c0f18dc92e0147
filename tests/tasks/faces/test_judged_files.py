"""Judging on files: the released numbers by the config's keys, and files refused."""

import io
import json
import pathlib
import pickle
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from sklearn.metrics import roc_auc_score

from fedfr_jax.__main__ import main
from fedfr_jax.data.align import arcface_template
from fedfr_jax.data.sources.folder import folder
from fedfr_jax.evaluation import templates, verification
from fedfr_jax.evaluation.identification import open_set_tpir, pair_tpir, rank_k
from fedfr_jax.federated.client import Population
from fedfr_jax.mesh import make_mesh
from fedfr_jax.runs import experiment
from fedfr_jax.stream import stream
from fedfr_jax.tasks.faces.face_images import Recognition
from fedfr_jax.tasks.faces.pair_list import pair_list
from fedfr_jax.tasks.faces.recognition import Judge
from fedfr_jax.tasks.faces.template_set import template_set
from fedfr_jax.types import Dataset, Networks

ROOT = pathlib.Path(__file__).parent.parent.parent.parent
SHAPE = (4, 4, 1)
SMALL = {"batch_size": 16, "fars": (0.1,), "fpirs": (0.5,)}


def numbered(rows):
    """Images [n, 4, 4, 1] that `looked_up` knows the number of; their left is white."""
    rows = np.asarray(rows)
    images = np.zeros((len(rows), *SHAPE), np.uint8)
    images[:, 0, :, 0], images[:, 1, :, 0] = rows[:, None] // 256, rows[:, None] % 256
    images[:, 2:, :2] = 255
    return images


def looked_up(features, x):
    """Features [B, D] of numbered images, from features [V, T, D], V - 1 mirrored."""
    pixels = jnp.round((x[..., 0] + 1) * 127.5).astype(jnp.int32)
    row = jnp.minimum(pixels[:, 0, 0] * 256 + pixels[:, 1, 0], features.shape[1] - 1)
    view = jnp.where(pixels[:, 2, 0] == 0, features.shape[0] - 1, 0)
    return features[view, row]


def png(image):
    file = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, "png")
    return file.getvalue()


def write_release(path, images, listed, points, pairs, galleries, probes):
    """A folder as IJB-C is released: `listed` are rows of (template, medium)."""
    (path / "loose_crop").mkdir(parents=True)
    (path / "meta").mkdir()
    names = [f"{row + 1}.png" for row in range(len(images))]
    for name, image in zip(names, images, strict=True):
        (path / "loose_crop" / name).write_bytes(png(image))

    def write(name, rows, separator=" ", header=""):
        lines = [separator.join(str(word) for word in row) for row in rows]
        text = "\n".join([header, *lines] if header else lines)
        (path / "meta" / name).write_text(text + "\n")

    named = lambda rows: [(n, *r) for n, r in zip(names, rows, strict=True)]
    write("ijbc_face_tid_mid.txt", named(listed))
    write("ijbc_name_5pts_score.txt", named(points))
    write("ijbc_template_pair_label.txt", pairs)
    header = "TEMPLATE_ID,SUBJECT_ID,FILENAME"
    files = {"gallery_G1": galleries[0], "gallery_G2": galleries[1]}
    for name, rows in {**files, "probe_mixed": probes}.items():
        rows = [(*row, "img/1.png") for row in rows]
        write(f"ijbc_1N_{name}.csv", rows, ",", header)


@pytest.fixture(scope="module")
def released():
    with np.load(ROOT / "tests" / "golden" / "fedfr_ijbc_style_eval.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def release(released, tmp_path_factory):
    """The golden set's images, numbered, in the layout of the release."""
    path = tmp_path_factory.mktemp("release") / "IJBC"
    number = len(released["faceness"])
    points = arcface_template((112, 112)).reshape(-1)
    subjects = lambda kind: list(
        zip(released[f"{kind}_templates"], released[f"{kind}_subjects"], strict=True)
    )
    write_release(
        path,
        numbered(range(number)),
        zip(released["template_id"], released["media_id"], strict=True),
        [(*points, repr(float(score))) for score in released["faceness"]],
        zip(released["p1"], released["p2"], released["label"], strict=True),
        (subjects("gallery")[:9], subjects("gallery")[9:]),
        subjects("probe"),
    )
    return path


@pytest.mark.parametrize("num_devices", [1, 3])
def test_templates_by_config_give_the_released_numbers(
    task, released, release, num_devices
):
    judge = Judge(
        task,
        make_mesh(num_devices),
        templates={"path": str(release), "align": False},
        **SMALL,
    )
    judged = judge.generic(looked_up, jnp.asarray(released["image_features"][None]))
    found = {k: v for k, v in judged.metrics.items() if k.startswith("ijb_")}
    # 1,707 pairs of two people and 37 probes do not tell the rates with a mark.
    rates = ("1e-06~", "1e-05~", "1e-04~", "1e-03", "1e-02", "1e-01")
    fars = [f"ijb_tar@far={rate}" for rate in rates]
    fpirs = ["ijb_tpir@fpir=1e-02~", "ijb_tpir@fpir=1e-01"]
    names = [*fars, "ijb_auc", *fpirs, *(f"ijb_rank@{k}" for k in (1, 5, 10))]
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
    judge = Judge(task, make_mesh(1), templates={**listed, "gallery": gallery}, **SMALL)
    judged = judge.generic(looked_up, jnp.asarray(released["image_features"][None]))
    scores = released["probe_features"] @ released["gallery_features"][:9].T
    is_mate = released["probe_ids"][:, None] == released["gallery_ids"][None, :9]
    has_mate = is_mate.any(axis=1)
    assert 0 < has_mate.sum() < len(has_mate)
    threshold = scores[~has_mate].max()  # a tenth of so few strangers is one at most
    best = np.where(is_mate, scores, -1).max(axis=1)
    is_found = (best == scores.max(axis=1)) & (best > threshold)
    expected = is_found[has_mate].mean()
    found = judged.metrics["ijb_open_tpir@fpir=1e-02~"]  # 17 strangers
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_faceness_norms_and_mirror_images_count_as_told(released, release):
    features = released["image_features"].astype(np.float32)
    views = np.stack([features, features[:, ::-1] * 0.5], axis=1)
    for flip, faceness, keep_norm in [(True, False, False), (True, True, True)]:
        options = {"flip": flip, "faceness": faceness, "keep_norm": keep_norm}
        given = template_set(
            SHAPE, path=release, align=False, probes=None, fars=0.1, **options
        )
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


def test_judged_features_are_of_the_image_and_its_mirror_image(task, release):
    features = np.random.default_rng(0).normal(size=(2, 260, 5)).astype(np.float32)
    options = {"path": release, "align": False, "flip": True}
    judge = Judge(task, make_mesh(2), templates=options, **SMALL)
    judged = judge.generic(looked_up, jnp.asarray(features)).metrics
    expected = template_set(SHAPE, **options).metrics(features.transpose(1, 0, 2))
    assert {k: judged[f"ijb_{k}"] for k in expected} == expected


def test_templates_are_streamed_as_the_partition_is(task, released, release):
    read, labels = lambda i: task.judged.images[i], task.judged.labels
    streamed = task._replace(judged=stream(read, labels, memory=2 * 20 * 16))
    network = jnp.asarray(released["image_features"][None])
    options = {"templates": {"path": release, "align": False}, **SMALL}
    judged = [
        Judge(t, make_mesh(2), **options).generic(looked_up, network).metrics
        for t in (task, streamed)
    ]
    assert judged[0] == judged[1]


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
        naming=r"(?P<identity>.+)\.png",
        landmarks=tmp_path / "a.csv",
        align=True,
    )
    found = template_set((24, 24, 3), path=tmp_path)
    rows = np.array([2, 0, 3, 1])
    np.testing.assert_array_equal(found.read(rows), expected.read(rows))
    stretched = template_set((24, 24, 3), path=tmp_path, align=False)
    assert (stretched.read(rows) != found.read(rows)).any()
    archive = shutil.make_archive(tmp_path / "crops", "zip", tmp_path / "loose_crop")
    zipped = template_set((24, 24, 3), path=tmp_path, images=archive)
    np.testing.assert_array_equal(zipped.read(rows), expected.read(rows))


def write_bin(path, is_same):
    images = [png(image) for image in numbered(range(2 * len(is_same)))]
    path.write_bytes(pickle.dumps((images, [bool(x) for x in is_same])))
    return path


def test_pairs_by_config_give_the_released_accuracy(task, golden, tmp_path):
    arrays = golden("fedfr_pair_verification")
    features, is_same = arrays["embeddings"].astype(np.float32), arrays["issame"]
    path = write_bin(tmp_path / "lfw.bin", is_same)
    judge = Judge(task, make_mesh(2), pairs=str(path), **SMALL)
    plain = Judge(task, make_mesh(2), **SMALL)
    judged = judge.generic(looked_up, jnp.asarray(features[None])).metrics
    mean = float(arrays["accuracy_mean"])
    assert judged["pairs_accuracy"] == pytest.approx(mean, abs=1e-6)
    tars = verification.tar_at_far(features, is_same, fars=(1e-3, 1e-2))
    # 270 pairs of two people in nine folds do not tell a rate of 0.001.
    for name, mark in (("tar@far=1e-03", "~"), ("tar@far=1e-02", "")):
        assert judged[f"pairs_{name}{mark}"] == pytest.approx(tars[name], abs=1e-6)
    without = plain.generic(looked_up, jnp.asarray(features[None])).metrics
    assert list(without) == ["tar@far=1e-01", "tpir@fpir=5e-01", "accuracy"]
    assert without.items() <= judged.items() and len(judged) == 6


def test_pairs_are_judged_by_the_sum_with_mirror_images_unless_told(tmp_path):
    rng = np.random.default_rng(0)
    is_same = np.tile([True, False], 30)
    views = rng.normal(size=(120, 2, 6)).astype(np.float32)
    path = write_bin(tmp_path / "a.bin", is_same)
    given = pair_list(SHAPE, path=path, folds=5, fars=0.2)
    expected = verification.ten_fold(
        verification.flip_sum(views[:, 0], views[:, 1]), is_same, folds=5
    )
    assert given.is_mirrored
    assert given.metrics(views)["accuracy"] == expected["accuracy"]
    single = pair_list(SHAPE, path=path, folds=5, flip=False)
    expected = verification.ten_fold(views[:, 0], is_same, folds=5)["accuracy"]
    assert not single.is_mirrored
    assert single.metrics(views[:, :1])["accuracy"] == expected


def write_search(path, listed):
    """TinyFace's layout: 4 probes, 4 mates and 6 distractors, by number 0 to 13."""
    folders = {"Probe": range(4), "Gallery_Match": range(4, 8)}
    folders["Gallery_Distractor"] = range(8, 14)
    for where, numbers in folders.items():
        (path / where).mkdir(parents=True)
        for i in numbers:
            person = i if where == "Gallery_Distractor" else i % 4
            name = f"{i:02}.png" if listed else f"{person}_{i:02}.png"
            (path / where / name).write_bytes(png(numbered([i])[0]))
    if listed:
        for kind, file, numbers in (
            ("probe", "probe", range(4)),
            ("gallery", "gallery_match", range(4, 8)),
        ):
            names = np.array([[f"{i:02}.png"] for i in numbers], dtype=object)
            ids = np.array([[i % 4] for i in numbers])
            content = {f"{kind}_set": names, f"{kind}_ids": ids}
            savemat(path / f"{file}_img_ID_pairs.mat", content)


@pytest.mark.parametrize("listed", [True, False])
def test_search_among_mates_and_distractors_ranks_by_all_scores(task, tmp_path, listed):
    write_search(tmp_path, listed)
    rng = np.random.default_rng(2)
    features = rng.normal(size=(14, 4)).astype(np.float32)
    features[4:8] += 0.3 * features[:4]
    judge = Judge(task, make_mesh(1), search=str(tmp_path), **SMALL)
    judged = judge.generic(looked_up, jnp.asarray(features[None])).metrics
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    scores = unit[:4] @ unit[4:].T
    ahead = (scores > np.diag(scores)[:, None]).sum(1)
    assert 0 < (ahead < 1).mean() < 1
    for k in (1, 5, 10, 20):
        assert judged[f"search_rank@{k}"] == (ahead < k).mean()
    (tmp_path / "Gallery_Match" / ("06.png" if listed else "2_06.png")).unlink()
    message = "hold every listed image" if listed else "a mate of every probe"
    with pytest.raises(ValueError, match=message):
        Judge(task, make_mesh(1), search=str(tmp_path), **SMALL)


def write_list(path, pairs):
    path.write_text("# first second same\n\n" + "\n".join(pairs) + "\n")


def test_a_development_list_sets_the_thresholds_of_a_list_without_folds(tmp_path):
    """All same pairs, then all different ones, as LFW's View 1 has them; by hand."""
    for i in range(24):
        (tmp_path / f"{i}.png").write_bytes(png(numbered([i])[0]))
    pairs = lambda start: [
        f"{start + 2 * i}.png {start + 2 * i + 1}.png {int(i < 3)}" for i in range(6)
    ]
    write_list(tmp_path / "dev.txt", pairs(0))
    write_list(tmp_path / "test.txt", pairs(12))
    source = lambda name: {
        "name": "listed_pairs",
        "path": str(tmp_path),
        "pairs": name,
    }
    given = pair_list(
        SHAPE,
        source=source("test.txt"),
        development=source("dev.txt"),
        fars=(0.2, 0.4),
        flip=False,
    )
    assert given.num_images == 24
    seen = given.read(np.array([23, 0, 13, 11]))
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
    with pytest.raises(ValueError, match="config.evaluation.pairs: every fold must"):
        pair_list(SHAPE, source=source("test.txt"), folds=2)
    for line in ("0.png 1.png maybe", "0.png 0.png 1", "0.png 1"):
        write_list(tmp_path / "bad.txt", [line])
        with pytest.raises(ValueError, match="bad.txt line 3 must be two images and"):
            pair_list(SHAPE, source=source("bad.txt"))
    write_list(tmp_path / "bad.txt", ["0.png 99.png 1"])
    with pytest.raises(ValueError, match="must hold every listed image, got none for"):
        pair_list(SHAPE, source=source("bad.txt"))


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
    given = pair_list((8, 8, 3), source=source, folds=2)
    assert given.num_images == 5  # both of p0 and of p2, p3's second
    values = given.read(np.arange(5)).mean((1, 2, 3))
    np.testing.assert_allclose(values, [0, 1, 40, 41, 61])


@pytest.mark.parametrize("word", ["binned", "exact"])
def test_personalised_thresholds_are_the_released_ones(golden, word):
    released = golden("fedfr_personalized_eval")
    features = [released["features"], released["gallery_image_features"]]
    classes = np.arange(60).reshape(3, 20)
    labels = released["labels"].astype(np.int32)
    own = released["gallery_image_labels"].astype(np.int32)
    order = np.argsort(own, kind="stable")
    own, gallery = own[order], len(labels) + order
    ends = np.searchsorted(own, [0, 20, 40, 60])
    unseen = np.repeat(np.arange(100, 110, dtype=np.int32), 4)

    class FakePartition:
        identities, unseen_labels = classes, unseen

    tested = np.concatenate([np.arange(len(labels)), np.zeros(len(unseen), int)])
    task = Recognition(
        FakePartition,
        Dataset.labelled(numbered(gallery), own),
        Population(ends, np.full(3, 20, np.int32)),
        Dataset.labelled(numbered(tested), np.concatenate([labels, unseen])),
        labels,
        own,
    )
    fars, fpirs = (1e-1, 1e-2, 1e-3, 1e-4), tuple(released["tpir_fpir"])
    judge = Judge(
        task, make_mesh(2), fars=fars, fpirs=fpirs, batch_size=64, personalised=word
    )
    network = jnp.asarray(np.concatenate(features)[None])
    judged = judge.personalised(looked_up, None, network)
    columns = list(judged.per_client.values())
    exact = np.stack([released[f"exact_tar_client{c}"] for c in range(3)])
    binned = released["tpr_percent_far_1e-1_to_1e-6"][:, :4]
    found = np.stack(columns[:4], axis=1)
    if word == "exact":
        np.testing.assert_allclose(found, exact, atol=1.01 / 15_600)
    else:
        np.testing.assert_allclose(100 * found, binned, atol=0.0101)
        assert np.abs(found - exact).max() > 1e-4
    tpir = np.stack(columns[4:], axis=1)
    np.testing.assert_allclose(tpir, released["tpir_clients"], atol=1e-9)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"personalised": "bins"},
            r"evaluation.personalised must be one of \['binned', 'exact'\], got 'bins'",
        ),
        ({"pairs": 3}, "config.evaluation.pairs must be a path or a mapping, got 3"),
        ({"pairs": "none.bin"}, "config.evaluation.pairs.*none.bin"),
        ({"pairs": {"fars": 0.1}}, "one of the keys path and source, got neither"),
        (
            {"pairs": {"path": "a", "far": 1}},
            "evaluation.pairs must have keys of .*far",
        ),
        (
            {"pairs": {"source": {"name": "orl", "data_dir": "none"}}},
            "config.evaluation.pairs.source: none must be a directory",
        ),
        (
            {"pairs": {"source": {"name": "pairs"}}},
            "config.evaluation.pairs.source.name must be one of",
        ),
        (
            {"pairs": {"source": "lfw"}},
            "pairs.source must be a mapping or none",
        ),
        (
            {"pairs": {"path": 3}},
            "pairs.path must be a text or a path or none, got 3",
        ),
        (
            {"templates": {"path": 3}},
            "templates.path must be a text or a path, got 3",
        ),
        ({"templates": "none"}, "config.evaluation.templates.media must name a file"),
        (
            {"templates": {"images": "x"}},
            "config.evaluation.templates must have the key path",
        ),
    ],
)
def test_wrong_settings_are_refused_by_their_key(task, options, message):
    with pytest.raises(ValueError, match=message):
        Judge(task, make_mesh(1), **options, **SMALL)


def test_pairs_without_both_kinds_in_each_fold_are_refused(tmp_path):
    path = write_bin(tmp_path / "a.bin", [True] * 10 + [False] * 10)
    with pytest.raises(ValueError, match="config.evaluation.pairs: every fold"):
        pair_list(SHAPE, path=path)
    with pytest.raises(ValueError, match="config.evaluation.pairs: folds must lie"):
        pair_list(SHAPE, path=path, folds=30)
    with pytest.raises(ValueError, match="config.evaluation.pairs.fars must lie in"):
        pair_list(SHAPE, path=path, fars=(0.1, 2))


META = {
    "media": "ijbc_face_tid_mid.txt",
    "landmarks": "ijbc_name_5pts_score.txt",
    "pairs": "ijbc_template_pair_label.txt",
    "gallery": "ijbc_1N_gallery_G1.csv",
    "probes": "ijbc_1N_probe_mixed.csv",
}


@pytest.fixture(scope="module")
def broken(release, tmp_path_factory):
    """A copy whose metadata a test may replace, file by file."""
    path = tmp_path_factory.mktemp("broken") / "IJBC"
    shutil.copytree(release, path)
    return path


@pytest.mark.parametrize(
    "key, change, message",
    [
        ("media", lambda lines: ["x.png 100 1", *lines], "none for 1 images .'x.png'"),
        ("media", lambda lines: lines[:9], "template ids must be among"),
        ("media", lambda lines: ["1.png 100"], "must have 3 words per line"),
        ("landmarks", lambda lines: lines[1:], "none for 1 images .'1.png'"),
        ("landmarks", lambda lines: [*lines, lines[0]], "and 1 rows too many"),
        (
            "landmarks",
            lambda lines: [*lines[:-1], "260.png" + " 5" * 11],
            "do not coincide, got others for 260.png",
        ),
        (
            "landmarks",
            lambda lines: [lines[0].rpartition(" ")[0] + " nan", *lines[1:]],
            "must have finite scores, got another for 1.png",
        ),
        ("pairs", lambda lines: [*lines, "100 7 1"], r"got \[7\]"),
        ("pairs", lambda lines: ["100 101 0"], "pairs of both labels"),
        ("gallery", lambda lines: [*lines, "9,9,9"], r"got \[9\]"),
        ("probes", lambda lines: [lines[0], "100,777,x"], "a subject of the gallery"),
        ("probes", None, "must name a file"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(broken, key, change, message):
    file = broken / "meta" / META[key]
    text = file.read_text()
    try:
        file.unlink() if change is None else file.write_text(
            "\n".join(change(text.splitlines()))
        )
        with pytest.raises(ValueError, match=message) as caught:
            template_set((112, 112, 1), path=broken)
        assert str(caught.value).startswith("config.evaluation.templates")
        # Too short a list of media is found by the pairs that are not in it.
        assert META[key] in str(caught.value) or key == "media"
    finally:
        file.write_text(text)


def test_listed_images_that_are_missing_are_refused(broken):
    image = broken / "loose_crop" / "7.png"
    data = image.read_bytes()
    image.unlink()
    try:
        message = (
            "templates: .*loose_crop must hold every listed image, got none for 1 of "
            r"260, first 7.png \(it holds "
        )
        with pytest.raises(ValueError, match=message):
            template_set((112, 112, 1), path=broken)
    finally:
        image.write_bytes(data)


def test_protocols_that_judge_nothing_or_need_more_are_refused(release):
    with pytest.raises(ValueError, match="pairs or probes must name a file"):
        template_set(SHAPE, path=release, align=False, pairs=None, probes=None)
    with pytest.raises(ValueError, match="templates.landmarks must name a file"):
        template_set(SHAPE, path=release, landmarks=None)
    with pytest.raises(ValueError, match="must be square or 112:96"):
        template_set((5, 4, 1), path=release)
    for wrong in ({"ranks": (0, 1)}, {"ranks": 0}, {"gallery": None}):
        with pytest.raises(ValueError, match="gallery must name a file and ranks"):
            template_set(SHAPE, path=release, align=False, **wrong)
    for wrong in ("few", (1, 2.5), (1, None), ((1,), (2, 3))):
        message = "config.evaluation.templates.ranks must be whole numbers, got"
        with pytest.raises(ValueError, match=message):
            template_set(SHAPE, path=release, align=False, ranks=wrong)
    with pytest.raises(ValueError, match="templates.fars must be one or more rates"):
        template_set(SHAPE, path=release, align=False, fars="few")
    bare = template_set(
        SHAPE, path=release, landmarks=None, align=False, faceness=False, pairs=None
    )
    assert bare.num_images == 260
    one = template_set(SHAPE, path=release, pairs=None, gallery=META_G2)
    assert one.num_images == 260


META_G2 = "meta/ijbc_1N_gallery_G2.csv"


CONFIG = '''"""A tiny run on arrays."""

from configs import base


def get_config():
    config = base.get_config()
    config.data = {"name": "arrays", "path": "PATH/faces.npz"}
    config.partition = {
        "num_clients": 2, "ids_per_client": 2, "num_global_ids": 4, "num_unseen_ids": 4,
    }
    config.model = {
        "name": "sphereface", "blocks": (0,), "widths": (4,), "embedding_dim": 8,
    }
    config.pretrain = {"epochs": 1, "batch_size": 8}
    config.federation = {"rounds": 1, "local_epochs": 1, "batch_size": 8}
    config.evaluation = {"batch_size": 8, "fars": (0.1,), "fpirs": (0.5,)}
    config.methods = {}
    return config.lock()
'''


@pytest.fixture
def tiny(tmp_path):
    """Flags of a run on 12 people x 8 images, and a template set of the same kind."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 8)
    centres = rng.uniform(60, 190, size=(12, 1, 12, 12, 1))
    draw = lambda: centres + rng.normal(scale=30, size=(12, 8, 12, 12, 1))
    clip = lambda x: x.clip(0, 255).astype(np.uint8).reshape(-1, 12, 12, 1)
    np.savez(tmp_path / "faces.npz", images=clip(draw()), labels=labels)
    images = clip(draw())
    points = 0.1 * arcface_template((112, 112)) + rng.normal(scale=0.5, size=(96, 5, 2))
    points = points.astype(np.float32)
    scores = rng.uniform(0.5, 1, 96).astype(np.float32)
    template = np.arange(96) // 4  # two of each person
    subject = np.arange(24) // 2
    pairs = [(a, b, int(a // 2 == b // 2)) for a in range(24) for b in range(a)]
    write_release(
        tmp_path / "IJBC",
        images,
        zip(template, np.arange(96) // 2, strict=True),
        np.column_stack([points.reshape(96, 10), scores]).tolist(),
        pairs,
        ([(t, subject[t]) for t in (0, 2, 4)], [(t, subject[t]) for t in (6, 8)]),
        [(t, subject[t]) for t in range(1, 24, 2)],
    )
    (tmp_path / "configs").mkdir()
    base = (ROOT / "configs" / "base.py").read_text()
    (tmp_path / "configs" / "base.py").write_text(base)
    config = tmp_path / "configs" / "tiny.py"
    config.write_text(CONFIG.replace("PATH", str(tmp_path)))
    return config, tmp_path, (template, np.array(pairs), subject)


def direct_numbers(apply, variables, path, template, pairs, subject, *, fars, fpirs):
    """What the evaluation room says of the set's embeddings."""
    images = template_set((12, 12, 1), path=path).read(np.arange(96))
    embed = jax.jit(apply)
    features = embed(variables, jnp.float32(images) / 127.5 - 1)
    _, _, scores = templates.read_landmarks(path / "meta" / META["landmarks"])
    weighed = templates.weigh_images(features, detector_scores=scores)
    found = templates.aggregate_templates(weighed, template, np.arange(96) // 2)
    compared = templates.pair_scores(found, pairs[:, :2])
    probes, gallery = np.arange(1, 24, 2), np.arange(0, 10, 2)
    search = (
        found.features[probes],
        subject[probes],
        found.features[gallery],
        subject[gallery],
    )
    return {
        **templates.tar_nearest_far(pairs[:, 2], compared, fars=fars),
        "auc": templates.area_under_curve(pairs[:, 2], compared),
        **pair_tpir(*search, fpirs=fpirs),
        **rank_k(*search, ranks=(1, 2)),
        # Seven strangers do not tell a rate of a tenth.
        **{f"open_{k}~": v for k, v in open_set_tpir(*search, fpirs=fpirs).items()},
    }


def test_train_and_evaluate_judge_by_the_direct_calls(tiny, monkeypatch, capsys):
    config, path, lists = tiny
    built = []
    for name in ("run_experiment", "evaluate_experiment"):
        keep = lambda made, folder: built.append(made)
        monkeypatch.setattr(experiment, name, keep)
    words = [f"--config={config}", f"--workdir={path / 'run'}"]
    rates = {"fars": (1e-2, 1e-1), "fpirs": (1e-1,)}
    options = {"path": str(path / "IJBC"), "ranks": (1, 2), **rates}
    for command in ("train", "evaluate"):
        extra = [] if command == "train" else [f"--config.evaluation.pairs={path}/p"]
        write_bin(path / "p", [True, False] * 10)
        given = f"--config.evaluation.templates={options}"
        assert main([command, *words, given, *extra]) == 0, capsys.readouterr().err
    trainers = [made.stages["pretrained"].trainer for made in built]
    start = trainers[0].init(jax.random.key(3))
    variables, apply = trainers[0].network(start), trainers[0].network_apply
    expected = direct_numbers(apply, variables, path / "IJBC", *lists, **rates)
    for made, trainer in zip(built, trainers, strict=True):
        networks = Networks(variables, trainer.network_apply, None, None)
        judged = made.task.evaluators["generic"].evaluate(networks).metrics
        actual = {k: v for k, v in judged.items() if k.startswith("ijb_")}
        assert actual == {f"ijb_{k}": pytest.approx(v) for k, v in expected.items()}
        assert 0 < actual["ijb_tar@far=1e-01"] < 1 and actual["ijb_rank@2"] > 0
        assert ("pairs_accuracy" in judged) == (made is built[1])
    assert main(["evaluate", *words, "--config.evaluation.personalised=linear"]) == 2
    message = "personalised must be one of ['binned', 'exact'], got 'linear'"
    assert message in capsys.readouterr().err


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # optax mixes int32 and float
def test_a_run_is_judged_by_files_in_every_row(tiny):
    config, path, _ = tiny
    text = config.read_text()
    config.write_text(text.replace("methods = {}", "methods = {'fedavg': base.FEDAVG}"))
    words = [f"--config={config}", f"--workdir={path / 'run'}"]
    files = f"--config.evaluation.templates={path / 'IJBC'}"
    binned = "--config.evaluation.personalised=binned"
    results = lambda name: json.loads((path / "run" / name).read_text())["methods"]
    assert main(["train", *words, files, binned]) == 0
    trained = results("summary.json")
    for row in ("pretrained", "fedavg"):
        assert {"ijb_tar@far=1e-02", "ijb_rank@5"} <= trained[row]["generic"].keys()
    assert main(["evaluate", *words, files, binned]) == 0
    assert results("evaluation.json") == trained
