"""Images with masks: pairs of files, numbers that stand for nothing, and CamVid."""

import numpy as np

from fedfr_jax.data.sources import open_source
from fedfr_jax.data.sources.segmentation import camvid, image_masks
from fedfr_jax.types import IGNORE_INDEX
from tests.data.files import png, zipped

CLASSES = ("sky", "cat", "dog")


def halves(left, right, size=(4, 6)):
    """A mask whose two halves are of two classes."""
    mask = np.full(size, left)
    mask[:, size[1] // 2 :] = right
    return png(mask)


def files(**changed):
    """Three images and a test image; `changed` replaces files, None takes one out."""
    given = {
        "images/a.png": png(1, size=(4, 6)),
        "images/b.png": png(2, size=(4, 6)),
        "images/c.png": png(3, size=(4, 6)),
        "images/test/d.png": png(4, size=(4, 6)),
        "masks/a.png": halves(0, 1),
        "masks/b.png": png(np.full((4, 6), 2)),
        "masks/c.png": halves(IGNORE_INDEX, 2),
        "masks/test/d.png": png([[1, 1, 1, 2, 0, 0]] * 4),
        "masks/of_nobody.png": halves(9, 9),
    }
    given |= {name.replace("_", "/") + ".png": data for name, data in changed.items()}
    return {name: data for name, data in given.items() if data is not None}


def source_of(tmp_path, given=None, **settings):
    path = zipped(tmp_path / "set.zip", files() if given is None else given)
    return image_masks(path, classes=CLASSES, **settings)


def test_an_image_goes_with_its_own_mask_whatever_the_order(tmp_path):
    source = source_of(tmp_path)
    assert source.input_shape == (4, 6, 3) and source.masks.class_names == CLASSES
    assert source.is_test.tolist() == [False, False, False, True]
    rows = np.array([2, 0, 3])
    assert source.read(rows)[:, 0, 0, 0].tolist() == [3, 1, 4]
    masks = source.masks.read(rows)
    assert masks.dtype == np.uint8 and masks.shape == (3, 4, 6)
    ends = [[IGNORE_INDEX, 2], [0, 1], [1, 0]]
    np.testing.assert_array_equal(masks[:, 0, [0, 5]], ends)


def test_a_label_is_the_largest_class_that_training_images_know(tmp_path):
    # The training images' largest are sky (a tie with cat), dog and dog, so the test
    # image is not labeled cat, of which it has most.
    source = source_of(tmp_path)
    assert source.names == ("sky", "dog") and source.labels.tolist() == [0, 1, 1, 0]
    source = source_of(tmp_path, background=("sky",))
    assert source.names == ("cat", "dog") and source.labels.tolist() == [0, 1, 1, 0]


def test_masks_shrink_to_their_nearest_pixels_and_never_mix(tmp_path):
    source = source_of(tmp_path, image_size=(2, 2))
    assert source.read(np.arange(1)).shape == (1, 2, 2, 3)
    found = source.masks.read(np.array([0, 2]))
    np.testing.assert_array_equal(found, [[[0, 1]] * 2, [[IGNORE_INDEX, 2]] * 2])


def binary(count):
    """Pairs of files whose masks are 0 and 255."""
    given = {f"images/{i}.png": png(i, size=(4, 6)) for i in range(count)}
    return given | {f"masks/{i}.png": halves(0, 255) for i in range(count)}


def test_classes_may_have_numbers_of_their_own(tmp_path):
    path = zipped(tmp_path / "set.zip", binary(2))
    numbers = {"object": 255, "background": 0}
    source = image_masks(path, classes=numbers, ignore_values=())
    assert source.masks.class_names == ("background", "object")
    np.testing.assert_array_equal(source.masks.read([1]), [[[0, 0, 0, 1, 1, 1]] * 4])


def test_camvid_is_read_as_its_split_says(tmp_path):
    given, every = {}, png([[*range(12), 3, 3]])
    for name in ("train/s1_1", "train/s2_1", "val/s3_1", "test/s1_2"):
        part, stem = name.split("/")
        given |= {f"{name}.png": png(0, size=(1, 14)), f"{part}annot/{stem}.png": every}
    zipped(tmp_path / "any.zip", given)
    source = camvid(tmp_path, labels="identity")
    assert source.names == ("s1", "s2") and source.labels.tolist() == [0, 0, 1]
    assert source.is_test.tolist() == [True, False, False]
    assert source.masks.class_names[3] == "Road" and source.masks.class_colors[3] == (
        128,
        64,
        128,
    )
    masks = source.masks.read(np.arange(3))
    assert set(np.unique(masks)) == {*range(11), IGNORE_INDEX}
    assert len(camvid(tmp_path, train=["train", "val"]).labels) == 4


def test_the_real_camvid(data_dir):
    source = open_source("camvid", data_dir=data_dir("camvid_180x240"))
    assert source.input_shape == (180, 240, 3)
    assert (len(source.labels), source.is_test.sum()) == (600, 233)
    masks = source.masks.read(np.flatnonzero(~source.is_test))
    share = np.bincount(masks.ravel(), minlength=256)[:11] / masks.size
    assert share.argmax() == source.masks.class_names.index("Road")
    assert 0.9 < share.sum() < 1
