"""Re-identification sets in every layout, and what is wrong with them."""

import io
import itertools
import zipfile

import numpy as np
import pytest
from PIL import Image

from fedfr_jax.data.sources import SOURCES, keep_rows, pack
from fedfr_jax.data.sources.join import join_sources
from fedfr_jax.types import GALLERY, QUERY, TRAIN

MARKET = {
    "bounding_box_train/0002_c1s1_000451_03.jpg": (TRAIN, "0002", 1),
    "bounding_box_train/0002_c6s1_000551_01.jpg": (TRAIN, "0002", 6),
    "bounding_box_train/0007_c15_f0044158.jpg": (TRAIN, "0007", 15),
    "query/0003_c2s1_000001_00.jpg": (QUERY, "0003", 2),
    "query/0009_c2s1_000001_00.jpg": (QUERY, "0009", 2),  # not in the gallery
    "bounding_box_test/0003_c3s1_000001_00.jpg": (GALLERY, "0003", 3),
    "bounding_box_test/-1_c3s1_000002_00.jpg": (GALLERY, "-1", 3),
    "bounding_box_test/0000_c3s1_000003_00.jpg": (GALLERY, "0000", 3),
}
OTHER = "gt_query/0003_c2s1_000001_00.jpg"  # of another folder, passed over


def jpeg(value=0, size=(4, 8)):
    file = io.BytesIO()
    Image.new("RGB", size, (value, value, value)).save(file, "png")
    return file.getvalue()


def written(root, names, **images):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(images.get(name, jpeg()))
    return root


def told(source):
    """{(role, person, camera)} of all images."""
    people = [source.names[label] for label in source.labels]
    roles, cameras = source.roles.tolist(), source.cameras.tolist()
    return sorted(zip(roles, people, cameras, strict=True))


@pytest.mark.parametrize("is_zipped", [False, True])
def test_the_official_folders_are_the_roles(tmp_path, is_zipped):
    path = written(tmp_path / "set", [*MARKET, OTHER])
    if is_zipped:
        path = tmp_path / "set.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for name in [*MARKET, OTHER]:
                archive.writestr(f"Market/{name}", jpeg())
    source = SOURCES["market1501"](path)
    assert told(source) == sorted(MARKET.values())
    assert source.image_shape == (256, 128, 3) and source.read(np.arange(8)).any() == 0
    few = keep_rows(source, np.flatnonzero(source.roles == GALLERY))
    assert {role for role, *_ in told(few)} == {GALLERY}


def test_nobody_and_strangers_are_neither_trained_on_nor_queries(tmp_path):
    each = itertools.product(("query", "bounding_box_train"), ("-1", "0000"))
    names = [f"{part}/{who}_c1_0.jpg" for part, who in each]
    source = SOURCES["market1501"](written(tmp_path, names))
    assert told(source) == sorted(2 * [(GALLERY, "-1", 1), (GALLERY, "0000", 1)])


def test_one_folder_is_tested_on_the_first_image_of_each_person_and_camera(tmp_path):
    people, cameras, times = ("0002", "0007", "0011", "0030"), "12", "012"
    each = itertools.product(people, cameras, times)
    names = [f"{who}_c{camera}s1_{time}.jpg" for who, camera, time in each]
    written(tmp_path, [*names, "-1_c1s1_0.jpg"])
    everybody = SOURCES["market1501"](tmp_path)
    assert np.bincount(everybody.roles).tolist() == [24, 0, 1]
    source = SOURCES["market1501"](tmp_path, test_identities=0.5)
    files = [*names, "-1_c1s1_0.jpg"]  # in the order of numbers
    queries = [files[row] for row in np.flatnonzero(source.roles == QUERY)]
    assert queries == [f"{who}_c{c}s1_0.jpg" for who in ("0011", "0030") for c in "12"]
    assert np.bincount(source.roles).tolist() == [12, 4, 9]
    make = lambda seed: SOURCES["market1501"](tmp_path, test_identities=1, seed=seed)
    people = {tuple(s.labels[s.roles == QUERY]) for s in map(make, range(6))}
    assert len(people) > 1 and {len(set(labels)) for labels in people} == {1}
    with pytest.raises(ValueError, match="leave some of 4 people to train on.*got 4"):
        SOURCES["market1501"](tmp_path, test_identities=4)


def test_people_numbered_twice_are_told_apart_where_asked(tmp_path):
    names = ["bounding_box_train/0000_c15_a.jpg", "query/0000_c1_a.jpg"]
    written(tmp_path, [*names, "bounding_box_test/0000_c10_b.jpg"])
    with pytest.raises(ValueError, match="0000 of bounding_box_train/0000_c15_a.jpg"):
        SOURCES["market1501"](tmp_path, distractor=None)
    source = SOURCES["market1501"](tmp_path, distractor=None, separate_ids=True)
    tested = [(QUERY, "test-0000", 1), (GALLERY, "test-0000", 10)]
    assert told(source) == [(TRAIN, "train-0000", 15), *tested]


def test_cuhk03_has_its_boxes_in_two_folders(tmp_path):
    for boxes in ("detected", "labeled"):
        written(tmp_path / boxes, ["bounding_box_train/0001_c1_1.png"])
    written(tmp_path / "labeled", ["query/0003_c2_1.png"])
    assert told(SOURCES["cuhk03_np"](tmp_path)) == [(TRAIN, "0001", 1)]
    labeled = SOURCES["cuhk03_np"](tmp_path, boxes="labeled")
    assert told(labeled) == [(TRAIN, "0001", 1), (QUERY, "0003", 2)]


LISTS = {
    "train": "0000/0000_000_01_a.jpg 0\n",
    "val": "0000/0000_001_15_a.jpg 0\n",
    "query": "0000/0000_000_07_a.jpg 0\n",
    "gallery": "0000/0000_001_12_a.jpg 0\n0001/0001_000_07_a.jpg 1\n",
}


def msmt17(root, **lists):
    lists = {**LISTS, **lists}
    for part, text in lists.items():
        (root / f"list_{part}.txt").write_text(text)
        folder = "train" if part in ("train", "val") else "test"
        written(root / folder, [line.split()[0] for line in LISTS[part].splitlines()])
    return root


def test_msmt17_is_read_by_its_lists(tmp_path):
    wanted = [(TRAIN, "train-0", 1), (TRAIN, "train-0", 15), (QUERY, "test-0", 7)]
    wanted += [(GALLERY, "test-0", 12), (GALLERY, "test-1", 7)]
    assert told(SOURCES["msmt17"](msmt17(tmp_path))) == wanted


@pytest.mark.parametrize(
    "text, message",
    [
        ("0001/0001_000_02_b.jpg 1\n", "list_query.txt, line 1.: copy them"),
        ("0000/0000.jpg 0\n", "list_query.txt, line 1 must be <path> <number> with"),
    ],
)
def test_a_list_that_does_not_fit_names_its_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        SOURCES["msmt17"](msmt17(tmp_path, query=text))


def csv_set(tmp_path, *lines, header="file, identity, camera, split"):
    path = written(tmp_path, ["a.png", "b/c.png", "d.png", "e.png"]) / "set.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def test_a_csv_tells_everything(tmp_path):
    lines = "a.png,ann,3,train", "b/c.png, bob, 12, query", "d.png,bob,4,gallery"
    source = SOURCES["reid_csv"](csv_set(tmp_path, *lines, "e.png,-1,4,train"))
    assert source.names == ("-1", "ann", "bob")
    wanted = [(TRAIN, "ann", 3), (QUERY, "bob", 12)]
    assert told(source) == [*wanted, (GALLERY, "-1", 4), (GALLERY, "bob", 4)]


@pytest.mark.parametrize(
    "lines, message",
    [
        (["a.png,ann,3,train", "lost.png,bob,1,query"], "1 of 2 .* first lost.png .*3"),
        (
            ["a.png,ann,,train"],
            "set.csv, line 2: camera must be a whole number.*got ''",
        ),
        (["a.png, ,1,train"], "set.csv, line 2: identity must be a name, .*got none"),
        (["a.png,ann,1,test"], "split one of train, query, gallery, got .* 'test'"),
        (["a.png,ann,1,train"] * 2, "line 3: an image must be listed once, got a.png"),
        (["a.png,ann,1,train", "d.png,ann,2,query"], "got ann of a.png in .* in both"),
        (["a.png,ann"], "set.csv must be a csv with the columns file, identity"),
        ([], "set.csv must hold images of the set, got none"),
    ],
)
def test_a_csv_that_does_not_fit_is_refused(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        SOURCES["reid_csv"](csv_set(tmp_path, *lines))


def test_names_without_a_camera_are_refused(tmp_path):
    written(tmp_path, ["0002_c1s1_1.jpg", "0003_s1_1.jpg"])
    with pytest.raises(ValueError, match="0003_s1_1.jpg in .* no camera in the name"):
        SOURCES["market1501"](tmp_path)
    with pytest.raises(ValueError, match="folders must have keys of .'gallery', 'q"):
        SOURCES["market1501"](tmp_path, folders={"test": "query"})


def test_images_of_several_sizes_are_resized_or_refused(tmp_path):
    other = {"0003_c1_1.jpg": jpeg(200, size=(6, 9))}
    written(tmp_path, ["0002_c1_1.jpg", "0003_c1_1.jpg"], **other)
    images = SOURCES["market1501"](tmp_path, image_size=(16, 8)).read(np.arange(2))
    assert images.shape == (2, 16, 8, 3) and (images[1] == 200).all()
    as_they_are = SOURCES["market1501"](tmp_path, image_size=None)
    assert as_they_are.read(np.array([0])).shape == (1, 8, 4, 3)
    with pytest.raises(ValueError, match="0003_c1_1.jpg in .*size .8, 4., got .9, 6."):
        as_they_are.read(np.arange(2))


def test_resizing_is_bicubic(tmp_path):
    ramp = np.arange(32, dtype=np.uint8).reshape(8, 4, 1) * np.ones(3, np.uint8) * 7
    file = io.BytesIO()
    Image.fromarray(ramp).save(file, "png")
    written(tmp_path, ["0002_c1_1.jpg"], **{"0002_c1_1.jpg": file.getvalue()})
    found = SOURCES["market1501"](tmp_path, image_size=(16, 8)).read(np.array([0]))[0]
    wanted = Image.fromarray(ramp).resize((8, 16), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(found, np.asarray(wanted))


def test_roles_and_cameras_are_packed_and_joined(tmp_path):
    source = SOURCES["market1501"](written(tmp_path / "set", MARKET))
    pack(source, tmp_path / "packed", say=lambda line: None)
    assert told(SOURCES["packed"](tmp_path / "packed")) == told(source)
    joined = join_sources({"x": source, "y": source})
    assert told(joined) == sorted(
        (role, f"{part}/{who}", camera)
        for part in "xy"
        for role, who, camera in told(source)
    )
    assert join_sources({"x": source, "y": source._replace(roles=None)}).roles is None


def test_market1501_has_its_cameras_and_queries(data_dir):
    path = data_dir("market1501_dev") / "market1501_dev.zip"
    source = SOURCES["market1501"](path, test_identities=500)
    cameras = np.bincount(source.cameras)[1:].tolist()
    assert cameras == [1315, 1127, 1817, 601, 1609, 2173]
    seen = np.unique(np.stack([source.labels, source.cameras]), axis=1)
    assert len(source.names) == 501 and seen.shape[1] == 2186
    is_tested = source.labels != 0  # the first by name is trained on
    assert (source.roles == QUERY).sum() == (seen[0] != 0).sum()
    np.testing.assert_array_equal(source.roles != TRAIN, is_tested)
