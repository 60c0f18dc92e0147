"""Settings and files that cannot be judged on are refused by their names."""

import shutil

import pytest

from fedfr_jax.mesh import make_mesh
from fedfr_jax.tasks.faces.evaluation_sets import pair_list, template_set
from fedfr_jax.tasks.faces.evaluator import FaceEvaluator
from tests.tasks.faces.evaluation_files import META, SHAPE, SMALL, write_bin

META_G2 = "meta/ijbc_1N_gallery_G2.csv"


@pytest.fixture(scope="module")
def broken(release, tmp_path_factory):
    """A copy whose metadata a test may replace, file by file."""
    path = tmp_path_factory.mktemp("broken") / "IJBC"
    shutil.copytree(release, path)
    return path


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"client_thresholds": "bins"},
            r"client_thresholds must be one of \['exact', 'binned'\], got 'bins'",
        ),
        ({"pairs": 3}, "pairs must be a mapping, got 3"),
        ({"pairs": "none.bin"}, "config.evaluation.pairs.*none.bin"),
        ({"pairs": {"fars": 0.1}}, "one of the keys path and source, got neither"),
        (
            {"pairs": {"path": "a", "far": 1}},
            "evaluation.pairs must have keys of .*far",
        ),
        (
            {"pairs": {"source": {"name": "orl", "data_dir": "none"}}},
            "config.evaluation.pairs.source.data_dir must exist, got none",
        ),
        (
            {"pairs": {"source": {"name": "pairs"}}},
            "config.evaluation.pairs.source.name must be one of",
        ),
        (
            {"pairs": {"source": "lfw"}},
            "pairs.source needs the key data_dir",
        ),
        (
            {"pairs": {"path": 3}},
            "pairs.path must be a text or a path or none, got 3",
        ),
        (
            {"templates": {"path": 3}},
            "templates.path must be a text or a path, got 3",
        ),
        ({"templates": "none"}, "config.evaluation.templates.media must be a file"),
        (
            {"templates": {"images": "x"}},
            "config.evaluation.templates needs the key path",
        ),
    ],
)
def test_wrong_settings_are_refused_by_their_key(task, options, message):
    with pytest.raises(ValueError, match=message):
        FaceEvaluator(task, make_mesh(1), **options, **SMALL)


def test_pairs_without_both_kinds_in_each_fold_are_refused(tmp_path):
    path = write_bin(tmp_path / "a.bin", [True] * 10 + [False] * 10)
    with pytest.raises(ValueError, match="config.evaluation.pairs: every fold"):
        pair_list(SHAPE, path=path)
    with pytest.raises(ValueError, match="config.evaluation.pairs: folds must be"):
        pair_list(SHAPE, path=path, folds=30)
    with pytest.raises(ValueError, match="fars must be in"):
        pair_list(SHAPE, path=path, fars=(0.1, 2))


@pytest.mark.parametrize(
    "key, change, message",
    [
        ("media", lambda lines: ["x.png 100 1", *lines], "none for 1 images .'x.png'"),
        ("media", lambda lines: lines[:9], "template ids must be among"),
        ("media", lambda lines: ["1.png 100"], "must have 3 (words|columns)"),
        ("landmarks", lambda lines: lines[1:], "none for 1 images .'1.png'"),
        ("landmarks", lambda lines: [*lines, lines[0]], "and 1 rows too many"),
        (
            "landmarks",
            lambda lines: [*lines[:-1], "260.png" + " 5" * 11],
            "distinct landmarks per image, got others for 260.png",
        ),
        (
            "landmarks",
            lambda lines: [lines[0].rpartition(" ")[0] + " nan", *lines[1:]],
            "must have finite scores, got a non-finite one for 1.png",
        ),
        ("pairs", lambda lines: [*lines, "100 7 1"], r"got \[7\]"),
        ("pairs", lambda lines: ["100 101 0"], "pairs of both labels"),
        ("gallery", lambda lines: [*lines, "9,9,9"], r"got \[9\]"),
        (
            "probes",
            lambda lines: [lines[0], "100,777,x"],
            "a probe with a mate in the gallery",
        ),
        ("probes", None, "must be a file"),
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
            "templates: .*loose_crop must have every listed image, got 1 of "
            r"260 missing, the first 7.png \(it has "
        )
        with pytest.raises(ValueError, match=message):
            template_set((112, 112, 1), path=broken)
    finally:
        image.write_bytes(data)


def test_protocols_that_judge_nothing_or_need_more_are_refused(release):
    with pytest.raises(ValueError, match="pairs or probes must be a file"):
        template_set(SHAPE, path=release, align=False, pairs=None, probes=None)
    with pytest.raises(ValueError, match="templates.landmarks must be a file"):
        template_set(SHAPE, path=release, landmarks=None)
    with pytest.raises(ValueError, match="must be square or 112:96"):
        template_set((5, 4, 1), path=release)
    for wrong in ({"ranks": (0, 1)}, {"ranks": 0}, {"gallery": None}):
        with pytest.raises(
            ValueError,
            match="gallery must|ranks must",
        ):
            template_set(SHAPE, path=release, align=False, **wrong)
    for wrong in ("few", (1, 2.5), (1, None), ((1,), (2, 3))):
        message = "^ranks must be a whole number or a list of whole numbers, got"
        with pytest.raises(ValueError, match=message):
            template_set(SHAPE, path=release, align=False, ranks=wrong)
    with pytest.raises(ValueError, match="^fars must be a finite number or a list"):
        template_set(SHAPE, path=release, align=False, fars="few")
    bare = template_set(
        SHAPE,
        path=release,
        landmarks=None,
        align=False,
        use_detector_score=False,
        pairs=None,
    )
    assert bare.num_images == 260
    one = template_set(SHAPE, path=release, pairs=None, gallery=META_G2)
    assert one.num_images == 260
