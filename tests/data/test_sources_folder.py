"""Folders and zips: namings, alignment, pairs, and what is refused."""

import zipfile

import numpy as np
import pytest

from fedfr_jax.data.align import ARCFACE_TEMPLATE, transform
from fedfr_jax.data.sources.folder import fei, folder, lfw, orl
from fedfr_jax.data.sources.inspection import inspect
from fedfr_jax.data.sources.pairs import listed_pairs
from fedfr_jax.data.sources.selection import concat_sources, keep_rows
from tests.data.files import fill, png, zipped

COLUMNS = "name,score," + ",".join(f"x{i},y{i}" for i in range(1, 6))
LANDMARKS = ARCFACE_TEMPLATE * 0.5 + 10  # on a 100 x 80 image


PEOPLE = {
    "s10/1.png": png(3),
    "s2/10.png": png(2),
    "s2/9.png": png(1),
    "README.txt": b"no image",
    "s2/.hidden.png": b"no image",
}


@pytest.mark.parametrize("make", [fill, lambda root, f: zipped(root / "a.zip", f)])
def test_directory_and_zip_give_the_same_source(tmp_path, make):
    source = folder(make(tmp_path, PEOPLE), image_size=(8, 6))
    assert source.names == ("s2", "s10")  # numbers in order, not s10 before s2
    assert source.labels.tolist() == [0, 0, 1] and source.labels.dtype == np.int32
    images = source.read(np.array([2, 0, 1]))
    assert images.shape == (3, 8, 6, 3) and images.dtype == np.uint8
    assert images[:, 0, 0, 0].tolist() == [3, 1, 2]
    assert source.input_shape == (8, 6, 3)


def test_images_are_resized_with_antialiasing_and_made_gray(tmp_path):
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    fill(tmp_path, {"a/1.png": png(stripes)})
    source = folder(tmp_path, image_size=8, channels=1)
    assert source.input_shape == (8, 8, 1)
    np.testing.assert_allclose(source.read(np.array([0])), 127.5, atol=5)


def test_a_naming_may_tell_the_test_part_and_the_first_image_the_size(tmp_path):
    names = ("train/b/1.png", "test/b/1.png", "train/a/1.png", "test/a/2.png")
    fill(tmp_path, {f"set/{name}": png(i) for i, name in enumerate(names)})
    source = folder(tmp_path, image_size=None, filename_pattern="train-test")
    assert source.names == ("a", "b") and source.input_shape == (8, 6, 3)
    assert source.labels.tolist() == [0, 1, 0, 1]
    assert source.is_test.tolist() == [True, True, False, False]
    assert source.read(np.arange(4))[:, 0, 0, 0].tolist() == [3, 1, 2, 0]
    kept = keep_rows(source, np.array([3, 0]))
    assert kept.is_test.tolist() == [False, True]
    assert folder(tmp_path, image_size=4).is_test is None


def test_namings_read_identity_and_camera_from_the_name(tmp_path):
    fill(
        tmp_path / "fei",
        {f"{s}-{v:02}.jpg": png(0) for s in (2, 10) for v in (1, 2)},
    )
    source = fei(tmp_path / "fei", image_size=4)
    assert source.names == ("2", "10")
    assert source.cameras.tolist() == [0, 1, 0, 1]
    fill(tmp_path / "market", {"0002_c1s1_000451_03.jpg": png(0)})
    fill(tmp_path / "market", {"-1_c6s2_000451_03.jpg": png(0)})
    source = folder(tmp_path / "market", image_size=4, filename_pattern="market1501")
    assert set(source.names) == {"0002", "-1"}
    own = r"(?P<identity>[a-z]+)[0-9]+\.png"
    fill(tmp_path / "own", {"anna1.png": png(0), "anna2.png": png(0)})
    assert folder(tmp_path / "own", image_size=4, filename_pattern=own).names == (
        "anna",
    )


def test_a_folder_that_is_in_the_set_twice_is_refused(tmp_path):
    fill(tmp_path, {"a/1.png": png(1), "b/1.png": png(2)})
    for target in (tmp_path, tmp_path / "a"):
        (tmp_path / "b" / "more").symlink_to(target)
        with pytest.raises(ValueError, match=r"once.*/b/more|b/more.*once"):
            folder(tmp_path, image_size=None)
        (tmp_path / "b" / "more").unlink()
    old = tmp_path / "b" / "old"
    old.symlink_to(old)  # leads nowhere, and is no image
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    fill(outside, {"1.png": png(3)})
    (tmp_path / "c").symlink_to(outside)
    assert folder(tmp_path, image_size=None).names == ("a", "b", "c")


@pytest.mark.parametrize("again", ["a//1.png", "./a/1.png"])
def test_a_member_of_a_zip_in_another_spelling_is_the_same_member(again, tmp_path):
    path = zipped(tmp_path / "z.zip", {again: png(1), "b/1.png": png(2)})
    assert folder(path, image_size=None).names == ("a", "b")
    assert folder(path, image_size=None).read(np.arange(2))[:, 0, 0, 0].tolist() == [
        1,
        2,
    ]
    files = {"./": b"", "a/1.png": png(1), again: png(1), "b/1.png": png(2)}
    with pytest.raises(ValueError, match="each file once, got a/1.png"):
        folder(zipped(path, files), image_size=None)


@pytest.mark.parametrize("system, people", [(0, ("a", "b")), (3, None)])
def test_backslashes_are_folders_in_zips_of_windows_alone(system, people, tmp_path):
    path = tmp_path / "z.zip"
    with zipfile.ZipFile(path, "w") as file:
        for number, name in enumerate(["a\\1.png", "b\\1.png"]):
            member = zipfile.ZipInfo(name)
            member.create_system = system  # 0 of FAT, 3 of Unix
            file.writestr(member, png(number))
    if people:
        assert folder(path, image_size=None).names == people
    else:
        with pytest.raises(ValueError, match="z.zip"):
            folder(path, image_size=None)


@pytest.fixture
def small_lfw(tmp_path):
    """Three people on 100 x 80 images with a bright left eye, as LFW is laid out."""
    counts = {"Ada_B": 2, "Carl_D": 2, "Eve_F": 1}
    image = np.zeros((100, 80, 3), np.uint8)
    x, y = np.round(LANDMARKS[0]).astype(int)
    image[y - 1 : y + 2, x - 1 : x + 2] = 255
    names = [f"{p}/{p}_{i + 1:04}.jpg" for p, n in counts.items() for i in range(n)]
    zipped(tmp_path / "lfw.zip", {name: png(image) for name in names})
    row = "0.9," + ",".join(map(str, LANDMARKS.reshape(-1)))
    lines = [COLUMNS, *(f"{name},{row}" for name in names)]
    (tmp_path / "landmarks.csv").write_text("\n".join(lines))
    pairs = "1\nAda_B\t1\t2\nCarl_D\t2\tEve_F\t1\n"
    (tmp_path / "pairsDevTrain.txt").write_text(pairs)
    return tmp_path


@pytest.mark.parametrize("size", [112, 56, (112, 96)])
def test_landmarks_follow_the_aligned_image_to_any_size(small_lfw, size):
    source = lfw(small_lfw, image_size=size)
    if size == 112:
        np.testing.assert_allclose(source.landmarks[0], ARCFACE_TEMPLATE, atol=1e-3)
    image = source.read(np.array([0]))[0, ..., 0].astype(np.float64)
    y, x = np.mgrid[: image.shape[0], : image.shape[1]]
    eye = np.array([(x * image).sum(), (y * image).sum()]) / image.sum()
    np.testing.assert_allclose(eye, source.landmarks[0, 0], atol=1.2)


def test_without_alignment_landmarks_scale_with_the_image(small_lfw):
    source = folder(
        small_lfw / "lfw.zip",
        image_size=(50, 40),
        landmarks=small_lfw / "landmarks.csv",
    )
    half = transform(np.array([[0.5, 0, -0.25], [0, 0.5, -0.25]]), LANDMARKS)
    np.testing.assert_allclose(source.landmarks[0], half, atol=1e-4)
    assert source.read(np.array([0])).shape == (1, 50, 40, 3)
    assert lfw(small_lfw, align=False).landmarks is None


def test_lfw_pairs_follow_the_images_that_are_kept(small_lfw):
    source = lfw(small_lfw)
    assert source.pairs.indices.tolist() == [[0, 1], [3, 4]]
    assert source.pairs.is_same.tolist() == [True, False]
    kept = lfw(small_lfw, min_images=2)
    assert kept.pairs.indices.tolist() == [[0, 1]]  # Eve_F has one image
    assert lfw(small_lfw, pairs=None).pairs is None
    turned = keep_rows(source, np.array([4, 3, 1]))
    assert turned.pairs.indices.tolist() == [[1, 0]]
    assert [turned.names[i] for i in turned.labels] == ["Eve_F", "Carl_D", "Ada_B"]


def test_folders_around_a_set_are_no_part_of_the_names(tmp_path):
    fill(tmp_path, {"set/x/a/1.png": png(1), "set/x/b/1.png": png(2)})
    assert folder(tmp_path, image_size=4).names == ("a", "b")
    assert folder(tmp_path, image_size=4, subfolder="set/x").names == ("a", "b")


def test_an_archive_beside_its_folders_is_ambiguous(small_lfw):
    fill(small_lfw, {"__MACOSX/a.png": b""})
    assert len(lfw(small_lfw).names) == 3
    (small_lfw / "unpacked").mkdir()
    with pytest.raises(ValueError, match="must have one .zip or folders of im"):
        lfw(small_lfw)


def test_real_lfw_is_whole_and_aligned(data_dir):
    source = lfw(data_dir("lfw_devtrain"), image_size=56)
    assert (len(source.labels), len(source.names)) == (9525, 4038)
    assert source.pairs.is_same.sum() == 1100 and len(source.pairs.is_same) == 2200
    same = source.labels[source.pairs.indices]
    np.testing.assert_array_equal(same[:, 0] == same[:, 1], source.pairs.is_same)
    center = source.landmarks.mean(0)
    np.testing.assert_allclose(center, ARCFACE_TEMPLATE / 2 - 0.25, atol=1)
    middle = source.landmarks.mean(1) - (ARCFACE_TEMPLATE / 2 - 0.25).mean(0)
    np.testing.assert_allclose(middle, 0, atol=1e-3)
    images = source.read(np.arange(0, 9525, 100))
    assert images.shape == (96, 56, 56, 3) and 80 < images.mean() < 150
    assert len(lfw(data_dir("lfw_devtrain"), min_images=4).names) == 430


def test_real_orl_and_fei_are_whole(data_dir):
    faces = orl(data_dir("orl"))
    assert np.bincount(faces.labels).tolist() == [10] * 40
    assert faces.read(np.array([0, 399])).shape == (2, 112, 92, 1)
    faces = fei(data_dir("fei28"))
    assert np.bincount(faces.labels).tolist() == [14] * 200
    assert np.bincount(faces.cameras).tolist() == [200] * 14
    assert faces.read(np.array([5])).std() > 10


def test_what_is_passed_over_is_counted_with_the_first_of_each_kind(tmp_path):
    files = {
        "ann/1.jfif": png(1),
        "ann/2.png": png(2),
        "bo/1.JPE": png(3),
        "bo/img7": png(4),
        "bo/img8": png(5),
        "ann/@eaDir/2.png/SYNOPHOTO_THUMB_M.jpg": png(6),
        "ann/.2.png": b"",
        "old.zip": b"",
        "\x1b[2Jnotes.txt": b"",
    }
    wanted = (
        "passed over in {}: 1 .txt (first \\x1b[2Jnotes.txt), 1 hidden (first "
        "ann/.2.png), 1 in @eaDir (first ann/@eaDir/2.png/SYNOPHOTO_THUMB_M.jpg), "
        "2 without a suffix (first bo/img7), 1 .zip (first old.zip)"
    )
    for path in (fill(tmp_path / "set", files), zipped(tmp_path / "set.zip", files)):
        source = folder(path, image_size=4)
        assert source.names == ("ann", "bo") and len(source.labels) == 3
        assert source.passed_over == wanted.format(path)
        assert inspect(source)["passed_over"] == source.passed_over
    nothing = fill(tmp_path / "nothing", {"bo/img7": png(4)})
    with pytest.raises(ValueError, match="got none. .* 1 without a suffix .first bo/i"):
        folder(nothing, image_size=4)


def test_images_that_a_list_does_not_name_are_counted(tmp_path):
    fill(tmp_path, {f"{name}.png": png(i) for i, name in enumerate("abcd")})
    (tmp_path / "pairs.csv").write_text("a.png,c.png,1\n")
    source = listed_pairs(tmp_path, pairs="pairs.csv", image_size=4)
    unused = "2 of the images (first b.png)"
    others = "1 .csv (first pairs.csv)"
    assert source.passed_over == f"passed over in {tmp_path}: {unused}, {others}"
    both = concat_sources({"x": source, "y": source._replace(passed_over="")})
    assert both.passed_over == source.passed_over


@pytest.mark.parametrize("make", [fill, lambda root, f: zipped(root / "a.zip", f)])
def test_a_name_in_two_spellings_is_one_person(tmp_path, make):
    one, two = "Jos\u00e9", "Jose\u0301"
    files = {f"{one}/1.png": 1, f"{two}/2.png": 2, "Bo/1.png": 4}
    path = make(tmp_path / "set", {name: png(i) for name, i in files.items()})
    source = folder(path, image_size=(8, 6))
    assert source.names == ("Bo", one)
    assert sorted(source.read(np.flatnonzero(source.labels))[:, 0, 0, 0]) == [1, 2]


@pytest.mark.parametrize("stored, listed", [("é", "e\u0301"), ("e\u0301", "é")])
def test_a_list_names_a_file_in_any_spelling_and_may_begin_with_a_mark(
    tmp_path, stored, listed
):
    fill(tmp_path, {f"{stored}/1.png": png(7, size=(100, 80))})
    row = ",".join(map(str, LANDMARKS.reshape(-1)))
    table = tmp_path / "landmarks.csv"
    header = "name," + COLUMNS.partition("score,")[2]
    table.write_text(f"\ufeff{header}\n{listed}/1.png,{row}\n", encoding="utf-8")
    source = folder(tmp_path, image_size=(100, 80), landmarks=table)
    np.testing.assert_allclose(source.landmarks[0], LANDMARKS, atol=1e-4)
    assert source.read(np.arange(1))[0, 0, 0, 0] == 7
