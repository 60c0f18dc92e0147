"""Re-identification sets in every layout, and what is wrong with them."""

import itertools
import shutil

import numpy as np
import pytest

from fedfr_jax.data.sources import SOURCES
from fedfr_jax.types import GALLERY, QUERY, TRAIN
from tests.data.files import fill, png

MARKET = {
    "bounding_box_train/0002_c1s1_000451_03.jpg": (TRAIN, "0002", 1),
    "bounding_box_train/0002_c6s1_000551_01.jpg": (TRAIN, "0002", 6),
    "bounding_box_train/0007_c15_f0044158.jpg": (TRAIN, "0007", 15),
    "bounding_box_train/-1_c1_0.jpg": (GALLERY, "-1", 1),  # nobody is trained on
    "query/0003_c2s1_000001_00.jpg": (QUERY, "0003", 2),
    "query/0009_c2s1_000001_00.jpg": (QUERY, "0009", 2),  # not in the gallery
    "bounding_box_test/0003_c3s1_000001_00.jpg": (GALLERY, "0003", 3),
    "bounding_box_test/-1_c3s1_000002_00.jpg": (GALLERY, "-1", 3),
    "bounding_box_test/0000_c3s1_000003_00.jpg": (GALLERY, "0000", 3),
}
OTHER = "gt_query/0003_c2s1_000001_00.jpg"  # of another folder, passed over


def written(root, names, **images):
    """Write small images of these names, or those given by name."""
    small = png(0, size=(8, 4))
    return fill(root, {"readme.txt": b""} | {x: images.get(x, small) for x in names})


def facts(source):
    """{(role, person, camera)} of all images."""
    people = [source.names[label] for label in source.labels]
    roles, cameras = source.roles.tolist(), source.cameras.tolist()
    return sorted(zip(roles, people, cameras, strict=True))


def test_the_official_folders_are_the_roles(tmp_path):
    source = SOURCES["market1501"](written(tmp_path, [*MARKET, OTHER]))
    assert facts(source) == sorted(MARKET.values())
    assert source.input_shape == (256, 128, 3)
    assert source.preprocessing.kernel == "bicubic"
    assert "1 of the images (first gt_query/" in source.passed_over


@pytest.mark.parametrize("queried", ["0001", "0000"])
def test_ids_from_0000_are_people_but_for_strangers_of_the_gallery(tmp_path, queried):
    """0000 is a stranger in the gallery alone, where no query asks for it."""
    trained = [f"000{i}" for i in range(8) if f"000{i}" != queried]
    names = [f"bounding_box_train/{who}_c1_0.jpg" for who in trained]
    names += [f"query/{queried}_c1_0.jpg", f"bounding_box_test/{queried}_c2_0.jpg"]
    names += ["bounding_box_test/0000_c3_1.jpg"]
    found = facts(SOURCES["market1501"](written(tmp_path, names)))
    assert [who for role, who, _ in found if role == TRAIN] == trained
    assert [who for role, who, _ in found if role == QUERY] == [queried]
    assert (GALLERY, "0000", 3) in found


def test_one_folder_is_tested_on_the_first_image_of_each_person_and_camera(tmp_path):
    people, cameras, times = ("0000", "0007", "0011", "0030"), "12", "012"
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


def test_one_name_in_training_and_test_is_refused(tmp_path):
    names = ["bounding_box_train/0000_c15_a.jpg", "query/0000_c1_a.jpg"]
    written(tmp_path, [*names, "bounding_box_test/0000_c10_b.jpg"])
    with pytest.raises(ValueError, match="0000 of bounding_box_train/0000_c15_a.jpg"):
        SOURCES["market1501"](tmp_path, distractor_identity=None)


def test_cuhk03_has_its_boxes_in_two_folders(tmp_path):
    for boxes in ("detected", "labeled"):
        written(tmp_path / boxes, ["bounding_box_train/0001_c1_1.png"])
    written(tmp_path / "labeled", ["query/0003_c2_1.png"])
    assert facts(SOURCES["cuhk03_np"](tmp_path)) == [(TRAIN, "0001", 1)]
    labeled = SOURCES["cuhk03_np"](tmp_path, boxes="labeled")
    assert facts(labeled) == [(TRAIN, "0001", 1), (QUERY, "0003", 2)]


LISTS = {
    "train": "0000/0000_000_01_a.jpg 0\n",
    "val": "0000/0000_001_15_a.jpg 0\n",
    "query": "0000/0000_000_07_a.jpg 0\n",
    "gallery": "0000/0000_001_12_a.jpg 0\n0001/0001_000_07_a.jpg 1\n",
}


def msmt17(root, **changed):
    for part, text in {**LISTS, **changed}.items():
        (root / f"list_{part}.txt").write_text(text)
        folder = "train" if part in ("train", "val") else "test"
        written(root / folder, [line.split()[0] for line in LISTS[part].splitlines()])
    return SOURCES["msmt17"](root)


def test_msmt17_is_read_by_its_lists(tmp_path):
    wanted = [(TRAIN, "train-0", 1), (TRAIN, "train-0", 15), (QUERY, "test-0", 7)]
    wanted += [(GALLERY, "test-0", 12), (GALLERY, "test-1", 7)]
    assert facts(msmt17(tmp_path)) == wanted
    with pytest.raises(ValueError, match="list_query.txt, line 1 must be <path> <num"):
        msmt17(tmp_path, query="0000/0000.jpg 0\n")
    with pytest.raises(ValueError, match="first test/0001/0001_000_02_b.jpg"):
        msmt17(tmp_path, query="0001/0001_000_02_b.jpg 1\n")


def from_csv(tmp_path, *lines):
    path = written(tmp_path, ["a.png", "b/c.png", "d.png", "e.png"]) / "set.csv"
    path.write_text("\n".join(["file, identity, camera, split", *lines]) + "\n")
    return SOURCES["reid_csv"](path)


def test_a_csv_says_everything(tmp_path):
    lines = "a.png,ann,3,train", "b/c.png, bob, 12, query", "d.png,bob,4,gallery"
    source = from_csv(tmp_path, *lines, "e.png,-1,4,train")
    assert source.names == ("-1", "ann", "bob")
    wanted = [(TRAIN, "ann", 3), (QUERY, "bob", 12)]
    assert facts(source) == [*wanted, (GALLERY, "-1", 4), (GALLERY, "bob", 4)]


def test_images_of_several_sizes_are_resized(tmp_path):
    other = {"0003_c1_1.jpg": png(200, size=(9, 6))}
    written(tmp_path, ["0002_c1_1.jpg", "0003_c1_1.jpg"], **other)
    images = SOURCES["market1501"](tmp_path, image_size=(16, 8)).read(np.arange(2))
    assert images.shape == (2, 16, 8, 3) and (images[1] == 200).all()
    like_the_first = SOURCES["market1501"](tmp_path, image_size=None)
    assert like_the_first.read(np.arange(2)).shape == (2, 8, 4, 3)


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


def counts(source):
    """{role: (people, images)}, as the paper's table has them."""
    roles, labels = source.roles, source.labels
    of = lambda role: (len(set(labels[roles == role])), (roles == role).sum())
    return {role: of(role) for role in (TRAIN, QUERY, GALLERY)}


VIPER = [f"VIPeR/cam_{c}/{i:03}_{x}.bmp" for i in range(8) for c, x in ("a0", "b9")]
CUHK01 = [f"campus/{i:04}{x:03}.png" for i in range(1, 6) for x in range(1, 5)]
VID = [
    f"i-LIDS-VID/{folder}/cam{c}/person{i:03}/cam{c}_person{i:03}.png"
    for folder in ("images", "sequences")
    for c in (1, 2)
    for i in range(1, 5)
]


@pytest.mark.parametrize(
    "name, names, tested, wanted",
    [
        ("viper", VIPER, 0.5, {TRAIN: (4, 8), QUERY: (4, 4), GALLERY: (4, 4)}),
        ("cuhk01", CUHK01, 3, {TRAIN: (2, 8), QUERY: (3, 6), GALLERY: (3, 6)}),
        ("ilids", VID, 0.5, {TRAIN: (2, 4), QUERY: (2, 2), GALLERY: (2, 2)}),
    ],
)
def test_half_of_the_cameras_of_a_tested_person_ask(
    tmp_path, name, names, tested, wanted
):
    source = SOURCES[name](written(tmp_path, names), test_identities=tested)
    assert counts(source) == wanted
    assert set(source.cameras[source.roles == QUERY]) == {1}
    assert set(source.cameras[source.roles == GALLERY]) == {2}
    make = lambda seed: SOURCES[name](tmp_path, test_identities=tested, seed=seed)
    people = {frozenset(s.labels[s.roles == QUERY]) for s in map(make, range(6))}
    assert len(people) > 1


def test_prid_has_people_of_both_cameras_and_of_each(tmp_path):
    numbers = {"a": [1, 2, 3, 4, 201, 202], "b": [1, 2, 3, 4, 201, 203, 204]}
    names = [f"cam_{c}/person_{i:04}" for c, of in numbers.items() for i in of]
    several = [
        f"prid_2011/multi_shot/{name}/000{x}.png" for name in names for x in "12"
    ]
    written(tmp_path, [f"prid_2011/single_shot/{x}.png" for x in names] + several)
    single = SOURCES["prid2011"](tmp_path)
    assert counts(single) == {TRAIN: (4, 6), QUERY: (2, 2), GALLERY: (5, 5)}
    found = facts(single)
    assert [(r, c) for r, who, c in found if who == "a-0201"] == [(TRAIN, 1)]
    assert [(r, c) for r, who, c in found if who == "b-0201"] == [(GALLERY, 2)]
    assert f"{len(several)} of the images" in single.passed_over
    # As FedReID has it: several shots of the same people's training, one in the test.
    mixed = SOURCES["prid2011"](tmp_path, train_shots="multi_shot")
    assert counts(mixed) == {TRAIN: (4, 12), QUERY: (2, 2), GALLERY: (5, 5)}
    of_role = lambda x, train: {row for row in facts(x) if (row[0] == TRAIN) is train}
    for train in (True, False):
        assert of_role(mixed, train) == of_role(single, train)
    shutil.rmtree(tmp_path / "prid_2011/multi_shot")
    with pytest.raises(ValueError, match="got none below multi_shot/. Copy that"):
        SOURCES["prid2011"](tmp_path, train_shots="multi_shot")


def test_3dpes_and_ilids_have_half_of_a_persons_views_as_queries(tmp_path):
    sequences = {1: [4, 5], 2: [17], 3: [6, 20, 21], 4: [8, 9]}
    each = [(i, s, n) for i, of in sequences.items() for s in of for n in (1, 30)]
    names = [f"3DPeS/RGB/{i}_{s}_FRAME_{n}_RGB.bmp" for i, s, n in each]
    names += [name.replace("RGB/", "mask/") for name in names]
    path = written(tmp_path / "3dpes", names)
    for seed in range(3):
        source = SOURCES["3dpes"](path, test_identities=3, seed=seed)
        tested = {source.names[i] for i in source.labels[source.roles != TRAIN]}
        queries = {(who, view) for role, who, view in facts(source) if role == QUERY}
        assert len(tested) == 3 and queries == {
            (who, view)
            for who in tested
            for view in sequences[int(who)][: len(sequences[int(who)]) // 2]
        }
    sizes = {1: 4, 2: 3, 3: 2, 4: 4}
    views = [(i, x) for i, count in sizes.items() for x in range(1, count + 1)]
    names = [f"i-LIDS_Pedestrian/Persons/{i:04}{x:03}.jpg" for i, x in views]
    source = SOURCES["ilids"](written(tmp_path / "ilids", names), test_identities=3)
    tested = {source.names[i] for i in source.labels[source.roles == QUERY]}
    queried = sum(sizes[int(who)] // 2 for who in tested)
    assert counts(source)[QUERY] == (3, queried)
