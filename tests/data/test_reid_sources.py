"""Re-identification sets in every layout, and what is wrong with them."""

import io
import itertools
import shutil
import zipfile

import numpy as np
import pytest
from PIL import Image

from fedfr_jax.data.sources import SOURCES, keep_rows, pack
from fedfr_jax.data.sources.selection import concat_sources
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
    assert source.input_shape == (256, 128, 3) and source.read(np.arange(8)).any() == 0
    few = keep_rows(source, np.flatnonzero(source.roles == GALLERY))
    assert {role for role, *_ in told(few)} == {GALLERY}


def test_nobody_is_neither_trained_on_nor_a_query(tmp_path):
    names = [f"{part}/-1_c1_0.jpg" for part in ("query", "bounding_box_train")]
    source = SOURCES["market1501"](written(tmp_path, names))
    assert told(source) == 2 * [(GALLERY, "-1", 1)]


@pytest.mark.parametrize("queried", ["0001", "0000"])
def test_ids_from_0000_are_people_but_for_strangers_of_the_gallery(tmp_path, queried):
    """0000 is a stranger in the gallery alone, where no query asks for it."""
    trained = [f"000{i}" for i in range(8) if f"000{i}" != queried]
    names = [f"bounding_box_train/{who}_c1_0.jpg" for who in trained]
    names += [f"query/{queried}_c1_0.jpg", f"bounding_box_test/{queried}_c2_0.jpg"]
    names += ["bounding_box_test/0000_c3_1.jpg"]
    found = told(SOURCES["market1501"](written(tmp_path, names)))
    assert [who for role, who, _ in found if role == TRAIN] == trained
    assert [who for role, who, _ in found if role == QUERY] == [queried]
    assert (GALLERY, "0000", 3) in found


def test_a_set_in_one_folder_tests_its_person_0000(tmp_path):
    each = itertools.product(("0000", "0001"), "12")
    names = [f"{who}_c{camera}_0.jpg" for who, camera in each]
    path = written(tmp_path, names)
    assert {role for role, *_ in told(SOURCES["market1501"](path))} == {TRAIN}
    tested = {
        who
        for seed in range(6)
        for role, who, _ in told(
            SOURCES["market1501"](path, test_identities=1, seed=seed)
        )
        if role == QUERY
    }
    assert tested == {"0000", "0001"}


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
    with pytest.raises(ValueError, match="leave at least one of 4 people.*got 4"):
        SOURCES["market1501"](tmp_path, test_identities=4)


def test_people_numbered_twice_are_told_apart_where_asked(tmp_path):
    names = ["bounding_box_train/0000_c15_a.jpg", "query/0000_c1_a.jpg"]
    written(tmp_path, [*names, "bounding_box_test/0000_c10_b.jpg"])
    with pytest.raises(ValueError, match="0000 of bounding_box_train/0000_c15_a.jpg"):
        SOURCES["market1501"](tmp_path, distractor_identity=None)
    source = SOURCES["market1501"](
        tmp_path, distractor_identity=None, separate_ids=True
    )
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
        ("0001/0001_000_02_b.jpg 1\n", "list_query.txt, line 1.. Copy them"),
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
            "set.csv, line 2: camera must be an integer.*got ''",
        ),
        (
            ["a.png, ,1,train"],
            "set.csv, line 2: identity must be a name, .*got an empty",
        ),
        (["a.png,ann,1,test"], "split one of train, query, gallery, got .* 'test'"),
        (["a.png,ann,1,train"] * 2, "line 3: an image must be listed once, got a.png"),
        (["a.png,ann,1,train", "d.png,ann,2,query"], "got ann of a.png in .* in both"),
        (["a.png,ann"], "set.csv must be a csv with the columns file, identity"),
        ([], "set.csv must have images of the set, got none"),
    ],
)
def test_a_csv_that_does_not_fit_is_refused(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        SOURCES["reid_csv"](csv_set(tmp_path, *lines))


def test_names_without_a_camera_are_refused(tmp_path):
    written(tmp_path, ["0002_c1s1_1.jpg", "0003_s1_1.jpg"])
    with pytest.raises(ValueError, match="0003_s1_1.jpg in .* no camera in the name"):
        SOURCES["market1501"](tmp_path)
    with pytest.raises(ValueError, match="folders must have the keys .'gallery', 'q"):
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
    joined = concat_sources({"x": source, "y": source})
    assert told(joined) == sorted(
        (role, f"{part}/{who}", camera)
        for part in "xy"
        for role, who, camera in told(source)
    )
    assert concat_sources({"x": source, "y": source._replace(roles=None)}).roles is None


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


def archive(root, names):
    """Files of an archive beside what else archives have."""
    return written(root, [*names, "readme.txt"])


def counts(source):
    """{role: (people, images)}, as the paper's table has them."""
    roles, labels = source.roles, source.labels
    of = lambda role: (len(set(labels[roles == role])), (roles == role).sum())
    return {role: of(role) for role in (TRAIN, QUERY, GALLERY)}


def test_viper_is_a_query_and_an_image_of_the_gallery_for_each_tested_person(tmp_path):
    sides = (("a", "45"), ("b", "90"))
    names = [f"VIPeR/cam_{c}/{i:03}_{x}.bmp" for i in range(8) for c, x in sides]
    source = SOURCES["viper"](archive(tmp_path, names))
    assert counts(source) == {TRAIN: (4, 8), QUERY: (4, 4), GALLERY: (4, 4)}
    assert set(source.cameras[source.roles == QUERY]) == {1}
    assert set(source.cameras[source.roles == GALLERY]) == {2}
    assert source.passed_over.endswith("1 .txt (first readme.txt)")
    people = [set(s.labels[s.roles == QUERY]) for s in (
        SOURCES["viper"](tmp_path, seed=seed) for seed in range(6)
    )]  # fmt: skip
    assert len({*map(frozenset, people)}) > 1
    with pytest.raises(ValueError, match="leave at least one of 8 people .*got 8"):
        SOURCES["viper"](tmp_path, test_identities=8)


def test_cuhk01_has_two_images_of_each_of_two_cameras(tmp_path):
    names = [f"campus/{i:04}{x:03}.png" for i in range(1, 6) for x in range(1, 5)]
    source = SOURCES["cuhk01"](archive(tmp_path, names), test_identities=3)
    assert counts(source) == {TRAIN: (2, 8), QUERY: (3, 6), GALLERY: (3, 6)}
    assert set(source.cameras[source.roles == QUERY]) == {1}


def test_prid_has_people_of_both_cameras_and_of_each(tmp_path):
    numbers = {"a": [1, 2, 3, 4, 201, 202], "b": [1, 2, 3, 4, 201, 203, 204]}
    names = [f"cam_{c}/person_{i:04}" for c, of in numbers.items() for i in of]
    several = [
        f"prid_2011/multi_shot/{name}/000{x}.png" for name in names for x in "12"
    ]
    single = [f"prid_2011/single_shot/{name}.png" for name in names]
    archive(tmp_path, [*single, *several])
    source = SOURCES["prid2011"](tmp_path)
    assert counts(source) == {TRAIN: (4, 6), QUERY: (2, 2), GALLERY: (5, 5)}
    found = told(source)
    assert [(r, c) for r, who, c in found if who == "a-0201"] == [(TRAIN, 1)]
    assert [(r, c) for r, who, c in found if who == "b-0201"] == [(GALLERY, 2)]
    assert f"{len(several)} of the images" in source.passed_over
    source = SOURCES["prid2011"](tmp_path, shots="multi_shot")
    assert counts(source) == {TRAIN: (4, 12), QUERY: (2, 4), GALLERY: (5, 10)}
    # As FedReID has it: several shots of the same people's training, one in the test.
    mixed = SOURCES["prid2011"](tmp_path, train_shots="multi_shot")
    assert counts(mixed) == {TRAIN: (4, 12), QUERY: (2, 2), GALLERY: (5, 5)}
    of_role = lambda x, train: [row for row in told(x) if (row[0] == TRAIN) is train]
    assert of_role(mixed, True) == of_role(source, True)
    single = SOURCES["prid2011"](tmp_path)
    assert of_role(mixed, False) == of_role(single, False)
    shutil.rmtree(tmp_path / "prid_2011/multi_shot")
    with pytest.raises(ValueError, match="got none below multi_shot/. Copy that"):
        SOURCES["prid2011"](tmp_path, train_shots="multi_shot")


def test_3dpes_has_half_of_a_persons_sequences_as_queries(tmp_path):
    sequences = {1: [4, 5], 2: [17], 3: [6, 20, 21], 4: [8, 9]}
    each = [(i, s, n) for i, of in sequences.items() for s in of for n in (1, 30)]
    names = [f"3DPeS/RGB/{i}_{s}_FRAME_{n}_RGB.bmp" for i, s, n in each]
    names += [name.replace("RGB/", "mask/") for name in names]
    path = archive(tmp_path, names)
    for seed in range(8):
        source = SOURCES["3dpes"](path, test_identities=3, seed=seed)
        tested = {source.names[i] for i in source.labels[source.roles != TRAIN]}
        views = {str(i): of for i, of in sequences.items() if str(i) in tested}
        queries = {
            (source.names[source.labels[row]], source.cameras[row])
            for row in np.flatnonzero(source.roles == QUERY)
        }
        assert queries == {
            (i, s) for i, of in views.items() for s in of[: len(of) // 2]
        }
        people = counts(source)[GALLERY][0]
        assert len(views) == people == 3


def test_ilids_has_no_cameras_and_ilids_vid_two(tmp_path):
    sizes = {1: 4, 2: 3, 3: 2, 4: 4}
    names = [
        f"i-LIDS_Pedestrian/Persons/{i:04}{x:03}.jpg"
        for i, n in sizes.items()
        for x in range(1, n + 1)
    ]
    source = SOURCES["ilids"](archive(tmp_path / "ilids", names), test_identities=3)
    halves = [
        sizes[int(source.names[i])] // 2
        for i in set(source.labels[source.roles == QUERY])
    ]
    assert counts(source)[QUERY] == (3, sum(halves))
    each = list(itertools.product((1, 2), range(1, 5)))
    names = [f"images/cam{c}/person{i:03}/cam{c}_person{i:03}.png" for c, i in each]
    names += [name.replace("images", "sequences") for name in names]
    source = SOURCES["ilids"](
        archive(tmp_path / "vid", [f"i-LIDS-VID/{n}" for n in names])
    )
    assert counts(source) == {TRAIN: (2, 4), QUERY: (2, 2), GALLERY: (2, 2)}
    with pytest.raises(ValueError, match="0001001.jpg or i-LIDS-VID/.*got a.png"):
        SOURCES["ilids"](written(tmp_path / "other", ["a.png"]))
