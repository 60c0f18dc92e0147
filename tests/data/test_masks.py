"""Images with masks: pairs of files, numbers that stand for nothing, and CamVid."""

import io
import zipfile

import numpy as np
import pytest
from PIL import Image

from fedfr_jax.data.sources import open_source
from fedfr_jax.data.sources.packed import pack, packed
from fedfr_jax.data.sources.segmentation import camvid, image_masks
from fedfr_jax.data.sources.selection import keep_rows
from fedfr_jax.types import IGNORE_INDEX

CLASSES = ("sky", "cat", "dog")


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(file, "png")
    return file.getvalue()


def picture(value, size=(4, 6)):
    return png(np.full((*size, 3), value))


def halves(left, right, size=(4, 6)):
    """A mask whose two halves are of two classes."""
    mask = np.full(size, left)
    mask[:, size[1] // 2 :] = right
    return png(mask)


def files(**changed):
    """Three images and a test image; `changed` replaces files, None takes one out."""
    given = {
        "images/a.png": picture(1),
        "images/b.png": picture(2),
        "images/c.png": picture(3),
        "images/test/d.png": picture(4),
        "masks/a.png": halves(0, 1),
        "masks/b.png": png(np.full((4, 6), 2)),
        "masks/c.png": halves(IGNORE_INDEX, 2),
        "masks/test/d.png": png([[1, 1, 1, 2, 0, 0]] * 4),
        "masks/of_nobody.png": halves(9, 9),
    }
    given |= {name.replace("_", "/") + ".png": data for name, data in changed.items()}
    return {name: data for name, data in given.items() if data is not None}


def zipped(path, contents):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    return path


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
    with pytest.raises(ValueError, match="background must be names .*got see"):
        source_of(tmp_path, background=("see",))


def test_masks_shrink_to_their_nearest_pixels_and_never_mix(tmp_path):
    source = source_of(tmp_path, image_size=(2, 2))
    assert source.read(np.arange(1)).shape == (1, 2, 2, 3)
    found = source.masks.read(np.array([0, 2]))
    np.testing.assert_array_equal(found, [[[0, 1]] * 2, [[IGNORE_INDEX, 2]] * 2])


def test_classes_may_begin_at_any_number_and_void_be_any_other(tmp_path):
    given = files(masks_a=halves(1, 2), masks_b=halves(3, 0), masks_c=halves(3, 7))
    source = source_of(tmp_path, given, first_class=1, ignore_values=(0, 7))
    masks = source.masks.read(np.arange(3))[:, 0]
    np.testing.assert_array_equal(
        masks[:, [0, 5]], [[0, 1], [2, IGNORE_INDEX], [2, IGNORE_INDEX]]
    )


def test_parts_and_packed_copies_keep_their_masks(tmp_path):
    source = source_of(tmp_path)
    part = keep_rows(source, np.array([3, 1]))
    whole = source.masks.read(np.arange(4))
    np.testing.assert_array_equal(part.masks.read(np.array([1, 0])), whole[[1, 3]])
    colored = source.masks._replace(class_colors=((1, 2, 3),) * 3)
    pack(source._replace(masks=colored), tmp_path / "packed")
    copy = packed(tmp_path / "packed")
    assert copy.masks[1:] == colored[1:]
    np.testing.assert_array_equal(copy.masks.read(np.array([2, 0])), whole[[2, 0]])


def binary(count):
    """Pairs of files whose masks are 0 and 255."""
    given = {f"images/{i}.png": picture(i) for i in range(count)}
    return given | {f"masks/{i}.png": halves(0, 255) for i in range(count)}


def test_a_class_that_no_mask_has_is_refused_with_what_to_do(tmp_path):
    path = zipped(tmp_path / "set.zip", binary(2))
    message = r"set.zip, got none of object, while 50.0% .* ignored \(\[255\]"
    for labels in ("largest", "identity"):
        naming = {"labels": labels, "images": r"images/(?P<pair>(?P<identity>.+))\.png"}
        with pytest.raises(ValueError, match=message):
            image_masks(path, classes=("background", "object"), **naming)


def test_classes_may_have_numbers_of_their_own(tmp_path):
    path = zipped(tmp_path / "set.zip", binary(2))
    numbers = {"object": 255, "background": 0}
    source = image_masks(path, classes=numbers, ignore_values=())
    assert source.masks.class_names == ("background", "object")
    np.testing.assert_array_equal(source.masks.read([1]), [[[0, 0, 0, 1, 1, 1]] * 4])
    for wrong, settings, rule in (
        (numbers, {}, r"different numbers, got 0 to 255 and \[255\]"),
        (numbers, {"first_class": 1}, "classes must .* and first_class 1"),
        ({"a": 3, "b": 3}, {}, "must have different numbers, got 3 to 3"),
        ((), {}, "classes must have different names"),
        (("a", "a"), {}, "classes must have different names"),
        (tuple(map(str, range(257))), {}, "classes must have different names and n"),
    ):
        with pytest.raises(ValueError, match=rule):
            image_masks(path, classes=wrong, **settings)


WRONG = [
    ({"masks_b": None}, {}, "images/b.png in .*set.zip must have a mask, got none"),
    (
        {"masks_c": halves(0, 3)},
        {},
        r"masks/c.png in .* must have .*2. or ignore_values \[255\], got 3",
    ),
    (
        {"masks_a": halves(0, 1, (6, 4))},
        {},
        r"masks/a.png in .* must have its image's size \(4, 6\), got \(6, 4\)",
    ),
    ({"masks_a": picture(0)}, {}, "masks/a.png in .* one byte per pixel.*got RGB"),
    ({"masks_a": b"cut"}, {}, "masks/a.png in .* must be a whole mask"),
    (
        {"other_images_a": picture(0)},
        {},
        "list each pair of images once, got a",
    ),
    ({}, {"ignore_values": (2,)}, "different numbers, got 0 to 2 and .2."),
    ({}, {"first_class": 254}, r"numbers in \[0, 255\], got .*254"),
    ({}, {"masks": ".*"}, "masks must be a regular expression with a group `pair`"),
    ({}, {"images": "(?P<pair>x)"}, "must have files that match images = .*got none"),
    ({}, {"labels": "identity"}, "labels must be 'largest' .*got 'identity'"),
    ({}, {"labels": "size"}, "labels must be one of .*got 'size'"),
]


@pytest.mark.parametrize("changed, settings, rule", WRONG)
def test_what_does_not_fit_is_refused_as_the_set_is_opened(
    tmp_path, changed, settings, rule
):
    with pytest.raises(ValueError, match=rule):
        source_of(tmp_path, files(**changed), **settings)


def test_camvid_is_read_as_its_split_says(tmp_path):
    given, every = {}, png([[*range(12), 3, 3]])
    for name in ("train/s1_1", "train/s2_1", "val/s3_1", "test/s1_2"):
        part, stem = name.split("/")
        given |= {f"{name}.png": picture(0, (1, 14)), f"{part}annot/{stem}.png": every}
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
